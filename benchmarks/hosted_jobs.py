"""Fine-tuning jobs of one host in this process, and the ways it can train them."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.tenants import window_of


class HostedJobs:
    """Jobs of one host, each on a thread of its own."""

    def __init__(
        self,
        model: Any,
        shape: str,
        way: str,
        sizes: Sequence[tuple[int, int]],
        *,
        device_share: Any = None,
        pass_rows: int | None = None,
    ) -> None:
        """`sizes`: of each job the sequences of a batch, and tokens of each."""
        from peft import LoraConfig

        from symbiosis.finetuning.config import TrainerConfig
        from symbiosis.finetuning.trainer import Trainer

        self.tokens = [batch * tokens for batch, tokens in sizes]
        rank, layers = SHAPES[shape].lora[3]
        rows = pass_rows or sum(self.tokens)
        limits = {"max_rows": max(rows, *(tokens for _, tokens in sizes)), "pass_rows": rows}
        room = max(1 << 16, 2 * sum(self.tokens))
        with training_way(way):
            self.host = Trainer(
                model,
                TrainerConfig(max_waiting_tokens=room, **limits, **({} if way == "graphs" else {"graphs": 0})),
                device_share,
            )
            self.sessions = [
                self.host.open(f"tenant {n}", LoraConfig(r=rank, target_modules=layers, task_type="CAUSAL_LM"), seed=n)
                for n in range(len(sizes))
            ]
        self.data = [_batch(model.config.vocab_size, batch, tokens, n) for n, (batch, tokens) in enumerate(sizes)]

    def steps(self, count: int) -> None:
        """So many steps of every job."""
        self._run([[None] * count for _ in self.sessions])

    def window(self, seconds: float) -> list[list[float]]:
        """Seconds of each step of each job, as `tenants.window`."""
        begin, end = window_of(seconds)
        return self._run([(begin, end)] * len(self.sessions))

    def finish(self, counts: Sequence[int]) -> list[float]:
        """When each job has made so many steps, in seconds from now; 0 for those that make none."""
        started = time.monotonic()
        ended = [0.0] * len(counts)

        def end(number: int) -> None:
            ended[number] = time.monotonic() - started

        self._run([[None] * count for count in counts], end)
        return ended

    def alone(self, counts: Sequence[int]) -> list[float]:
        """The same of each job by itself, one after the other."""
        return [
            self.finish([count if number == which else 0 for number, count in enumerate(counts)])[which]
            for which in range(len(counts))
        ]

    def _run(self, tasks: Sequence[Any], on_end: Callable[[int], None] = lambda number: None) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in tasks]
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                found[number] = _train(self.sessions[number], self.data[number], tasks[number])
                on_end(number)
            except BaseException as error:  # noqa: BLE001 - raised below, by the thread that asked
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number, task in enumerate(tasks) if task]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def close(self) -> None:
        self.host.close()
        self.sessions = []
        gc.collect()


def _train(session: Any, batch: Any, task: Any) -> list[float]:
    """Step after step, the next asked for before the last is answered, as `training.job` does it."""
    from symbiosis.finetuning.optimizer import StepSettings

    settings, seconds, under_way = StepSettings(learning_rate=1e-4), [], []
    by_clock = isinstance(task, tuple)
    last = time.monotonic()
    left = None if by_clock else len(task)
    while left is None or left > 0 or under_way:
        if left is None or left > 0:
            under_way.append((session.forward_backward(batch), session.optim_step(settings)))
            left = None if left is None else left - 1
            if len(under_way) < 2 and (left is None or left > 0):
                continue
        loss, step = under_way.pop(0)
        loss.result()
        step.result()
        now = time.monotonic()
        if by_clock and left is None:
            if task[0] < now <= task[1]:
                seconds.append(now - last)
            if now > task[1]:
                left = 0
                seconds = seconds or [now - last]
        last = now
    return seconds


def _batch(vocabulary: int, batch: int, tokens: int, seed: int) -> Any:
    import torch

    from symbiosis.finetuning.examples import Example

    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (batch, tokens), generator=random).tolist()
    return [Example(tuple(row), tuple(row)) for row in rows]


@contextlib.contextmanager
def training_way(way: str) -> Iterator[None]:
    """ "loop" is what runs where there are no kernels."""
    from symbiosis import kernels

    plain = kernels.run_on
    if way == "loop":
        kernels.run_on = lambda device: False
    try:
        yield
    finally:
        kernels.run_on = plain


def synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
