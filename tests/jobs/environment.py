"""A supervisor over a temporary folder, with a fake engine and a fake adapter store."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from symbiosis.errors import UnknownAdapter
from symbiosis.jobs.data_preparation import DataPreparer
from symbiosis.jobs.database import HYPERPARAMETERS, Database
from symbiosis.jobs.errors import StorageFull
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters, build_plan, resolve_length
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor
from tests.tiny_chat import tiny_tokenizer

LIMITS = JobLimits(running=2, tenant_running=1)
PARAMS = Hyperparameters(n_steps=10, checkpoint_every=2)
DATA = {"length": resolve_length(PARAMS, 256), "examples": 8, "tokens": 9, "validates": False}
PLAN = asdict(build_plan(PARAMS, **DATA, seed=3, max_steps=100))
ASKED = {"training_file": "f", "validation_file": None, "suffix": None, "metadata": None, "seed": 3, HYPERPARAMETERS: {}}


@dataclass
class Engine:
    """Records requests; sends the events of the test."""

    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    inbox: asyncio.Queue[Any] | None = None

    async def open(self, body, inbox):
        id = str(len(self.requests))
        self.requests[id], self.inbox = body, inbox
        return id

    def forget(self, id: str) -> None:
        pass

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        self.stopped.append(id)
        if at_once:
            self.dropped.append(id)

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        self.calls.append((op, body))
        if op == "unload":
            raise UnknownAdapter("none")
        return {"hash": "h"}

    def send(self, id: str, kind: str, **body: Any) -> None:
        self.inbox.put_nowait({"id": id, "training": {kind: body}})

    def step(self, id: str, step: int) -> None:
        figures = {"loss": 1.0 / step, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens": 7, "tokens_per_s": 70.0}
        self.send(id, "step", step=step, total=10, **figures)

    def checkpoint(self, id: str, step: int) -> None:
        folder = Path(self.requests[id]["checkpoints"]) / f"step-{step}"
        folder.mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors", "training_state.safetensors"):
            (folder / file).write_text("x")
        self.send(id, "checkpoint", step=step, folder=str(folder), hash=f"h{step}", serves=None)

    def finish(self, id: str) -> None:
        folder = Path(self.requests[id]["final"])
        folder.mkdir()
        self.send(id, "trained", step=10, loss=0.1, folder=str(folder), hash="h10", generation=1)

    def running(self, job: str) -> str:
        """The key of the job's last run."""
        return max((id for id, body in self.requests.items() if job in body["data"]), key=int)


@dataclass
class Store:
    root: Path
    added: dict[tuple[str | None, str], str] = field(default_factory=dict)

    def new_location(self, tag: str) -> str:
        return str(self.root / f"upload-{tag}")

    def add(self, owner, name, location) -> None:
        assert Path(location).is_dir()
        self.added[owner, name] = location

    def discard(self, location) -> None:
        shutil.rmtree(location, ignore_errors=True)

    def has(self, owner, name) -> bool:
        return (owner, name) in self.added

    def remove(self, owner, name) -> bool:
        return self.added.pop((owner, name), None) is not None

    def check_bytes(self, owner) -> None:
        pass

    def check_count(self, owner, expected) -> None:
        pass


class World:
    """One folder of jobs; each `start` simulates a new server process over it."""

    def __init__(self, root: Path, limits: JobLimits = LIMITS) -> None:
        (root / "store").mkdir()
        self.limits, self.store = limits, Store(root / "store")
        self.layout = JobsLayout(root / "jobs")
        self.db = Database(self.layout.database_path)
        self.counted: list[tuple[str, int, int]] = []

    async def start(self) -> tuple[Supervisor, Engine]:
        self.engine = Engine()
        preparer = DataPreparer(tiny_tokenizer(), 256, self.layout, self.limits)
        self.supervisor = Supervisor(
            self.db,
            self.layout,
            self.engine,
            self.store,
            preparer,
            self.limits,
            count_steps=lambda *counted: self.counted.append(counted),
        )
        await self.supervisor.start()
        return self.supervisor, self.engine

    async def kill(self) -> None:
        """As SIGKILL does: nothing is sent or cleaned up."""
        self.supervisor._task.cancel()
        await asyncio.gather(self.supervisor._task, return_exceptions=True)

    def add(self, id: str, tenant: str = "ann", state: JobState = JobState.QUEUED) -> str:
        id = f"ftjob-{id}"
        self.layout.job_folder(id).mkdir()
        self.db.add_job(id, tenant, tenant, f"ft-{id}", state, ASKED, PLAN)
        return id

    def state(self, id: str) -> JobState:
        return self.db.get_job(id).state


async def until(true, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.002)


def fill_disk(db: Database) -> list[Any]:
    """The disk rejects three events. Returns them."""
    add, failures = db.add_event, []

    def full(*args: Any, **options: Any) -> None:
        if len(failures) < 3:
            failures.append(args)
            raise StorageFull("full")
        add(*args, **options)

    db.add_event = full
    return failures


def run_async(coroutine):
    """Run a coroutine as a test."""

    if "monkeypatch" in inspect.signature(coroutine).parameters:

        def test(world, monkeypatch):
            asyncio.run(coroutine(world, monkeypatch))

    else:

        def test(world):
            asyncio.run(coroutine(world))

    test.__name__, test.__doc__ = coroutine.__name__, coroutine.__doc__
    return test
