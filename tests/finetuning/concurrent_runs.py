"""Running many jobs at once, and comparing what they trained."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from symbiosis.finetuning.loop.train_loop import LoopResult, run
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.trainer_reference import TASKS, Task, reference_run


def open_session(trainer: Trainer, task: Task) -> TrainingSession:
    return trainer.open(task.name, task.adapter, seed=task.settings()["seed"])


def run_concurrently(
    trainer: Trainer, tasks: list[Task], **options: Any
) -> dict[str, tuple[TrainingSession, list[LoopResult]]]:
    """All tasks to their end, each on a thread of its own."""
    sessions = {task.name: (open_session(trainer, task), []) for task in tasks}
    with ThreadPoolExecutor(len(tasks)) as threads:
        running = [
            threads.submit(run, session, TASKS[name].data(), TASKS[name].recipe_of(), on_step=done.append, **options)
            for name, (session, done) in sessions.items()
        ]
        for each in running:
            each.result()
    return sessions


def assert_equals_trainer(session: TrainingSession, name: str, relative: float = 1e-5) -> None:
    """Every parameter is Trainer's, measured by how far training moved it."""
    reference = reference_run(name)
    assert session.adapter.parameters.keys() == reference.end.keys()
    assert_close(dict(session.adapter.parameters), reference.end, reference.start, relative)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor], relative: float) -> None:
    for name, value in expected.items():
        moved = (value - start[name]).norm()
        assert moved > 0, f"{name} was not trained"
        error = float((found[name].detach() - value).norm() / moved)
        assert error <= relative, f"{name}: off by {error:.1e} of what training changed"


def values(session: TrainingSession) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in session.adapter.parameters.items()}


def all_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
