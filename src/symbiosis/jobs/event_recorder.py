"""What the engine says of a job, as it is recorded: all that came together in one transaction."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from symbiosis.adapters.names import split_qualified_name
from symbiosis.common.throughput import Throughput
from symbiosis.errors import SymbiosisError
from symbiosis.jobs.database import Database, JobRecord
from symbiosis.jobs.states import JobState, StateChange

_ENDS = ("trained", "stopped", "failed")
_NO_ROOM = ("too_many_requests", "closed", "engine_lost")
Said = dict[str, Any]
Count = Callable[[str, int, int], None]


class AdapterShelf(Protocol):
    """Where finished adapters are kept."""

    def place(self, tag: str) -> Path:
        """A folder that is not there yet."""
        ...

    def keep(self, owner: str | None, name: str, folder: Path) -> None:
        """It stays, under this name, and the next server has it too."""
        ...

    def has(self, owner: str | None, name: str) -> bool:
        """Whether there is one, or one is being uploaded."""
        ...

    def remove(self, owner: str | None, name: str) -> bool:
        """False if it is not kept here."""
        ...

    def check_bytes(self, owner: str | None) -> None:
        """Raises `QuotaExceeded` if an owner's adapters take all its room."""
        ...


@dataclass(frozen=True, slots=True)
class LastEvent:
    step: int
    name: str
    """Of the adapter it became."""

    def __str__(self) -> str:
        return f"its last good checkpoint, of step {self.step}, was put up as the adapter {self.name}"


@dataclass(slots=True)
class JobRun:
    """A job at the engine."""

    job: str
    tenant: str
    epoch: int
    final: Path
    steps: Throughput | None = None
    """Since it began."""
    tokens: Throughput | None = None
    yields: bool = False
    """Whether it was told to make room for another's."""
    last: LastEvent | None = None
    """If it failed: its last good checkpoint, which is served."""
    rests: bool = False
    """It ended since the engine had no room: not to be started again at once."""
    left: list[str] = field(default_factory=list)
    """Folders of checkpoints that nobody needs once what was said is recorded."""


class EventRecorder:
    """Any thread may use it. `count` hears of steps: a tenant, how many, and their tokens."""

    def __init__(
        self,
        records: Database,
        shelf: AdapterShelf,
        count: Count = lambda tenant, steps, tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._shelf, self._count, self._clock = records, shelf, count, clock

    def take(self, trial: JobRun, events: list[Said]) -> JobRecord:
        """Raises `StorageFull`; then nothing of it was recorded."""
        trial.left.clear()
        with self._records.transaction():
            for event in events:
                self._note(self._records.job(trial.job), trial, event)
            job = self._records.job(trial.job)
        for folder in trial.left:
            shutil.rmtree(folder, ignore_errors=True)
        steps = [event["training"]["step"] for event in events if "step" in event.get("training", ())]
        if steps:
            self._count(trial.tenant, len(steps), sum(step["tokens"] for step in steps))
        return job

    def _note(self, job: JobRecord, trial: JobRun, event: Said) -> None:
        if "refused" in event:
            self._failure(job, trial, event["refused"])
            return
        kind, body = next(iter(event["training"].items()))
        if job.state.is_end:
            return
        if kind == "begun":
            self._records.set(job.id, steps=body["steps"])
            trial.steps, trial.tokens = Throughput(self._clock()), Throughput(self._clock())
        elif kind == "step":
            self._step(job, trial, body)
        elif kind == "validation":
            said = f"Step {body['step']}/{job.steps}: validation loss={body['loss']:.4f}"
            data = {"step": body["step"], "total_steps": job.steps, "valid_loss": body["loss"]}
            self._records.add_event(job.id, "metrics", said, step=body["step"], data=data)
            self._records.set(job.id, figures={**job.figures, "valid_loss": body["loss"]})
        elif kind == "checkpoint":
            self._checkpoint(job, trial, body["step"], body["folder"], body["hash"], body["serves"])
        elif kind == "stopped":
            if body["folder"] is not None:
                self._checkpoint(job, trial, body["step"], body["folder"], None, None)
            if job.state is JobState.RUNNING:
                self._records.change(job.id, StateChange.INTERRUPT, epoch=trial.epoch)
        elif kind == "failed":
            if body["checkpoint"] is not None:
                self._checkpoint(job, trial, step_of(body["checkpoint"]), body["checkpoint"], None, None)
            self._failure(job, trial, body)
        elif kind == "trained":
            self._shelf.keep(job.owner, job.name, Path(body["folder"]))
            self._records.change(job.id, StateChange.SUCCEED, epoch=trial.epoch, hash=body["hash"], step=body["step"])
            if trial.tokens is not None and trial.tokens.mean:
                self._records.set(job.id, figures={**job.figures, "tokens_per_s": trial.tokens.mean})
            self._records.forget_served(job, before=body["step"])
            self._records.add_event(job.id, "message", f"New fine-tuned model created: {job.name}")
            self._records.add_event(job.id, "message", "The job has successfully completed")

    def _step(self, job: JobRecord, trial: JobRun, body: Said) -> None:
        now = self._clock()
        finish = None
        if trial.steps is not None and trial.tokens is not None:
            trial.steps.record(1, now)
            trial.tokens.record(body["tokens"], now)
            finish = int(now + (body["total"] - body["step"]) / trial.steps.recent)
        figures = {
            "train_loss": body["loss"],
            "learning_rate": body["learning_rate"],
            "gradient_norm": body["gradient_norm"],
            "tokens_per_s": body["tokens_per_s"],
        }
        data = {"step": body["step"], "total_steps": body["total"], "tokens": body["tokens"], **figures}
        said = f"Step {body['step']}/{body['total']}: training loss={body['loss']:.4f}"
        self._records.add_event(job.id, "metrics", said, step=body["step"], data=data)
        self._records.set(
            job.id,
            step=body["step"],
            steps=body["total"],
            tokens=job.tokens + body["tokens"],
            figures={**job.figures, **figures, "finish_at": finish},
        )

    def _checkpoint(self, job: JobRecord, trial: JobRun, step: int, folder: str, hash: str | None, serves: str | None) -> None:
        metrics: Said = {"step": step}
        metrics |= {key: job.figures[key] for key in ("train_loss", "valid_loss") if key in job.figures}
        name = None if serves is None else split_qualified_name(serves)[1]
        if self._records.add_checkpoint(job, step, folder, hash, name, metrics):
            self._records.add_event(job.id, "message", f"Checkpoint created at step {step}", step=step, data={"step": step})
        if name is not None:
            self._records.forget_served(job, before=step)
        trial.left += self._records.drop_folders(job, before=step)

    def _failure(self, job: JobRecord, trial: JobRun, body: Said) -> None:
        if job.state.is_end:
            return
        if body["code"] not in _NO_ROOM:
            said = body["message"] if trial.last is None else f"{body['message']}; {trial.last}"
            self.fail(job.id, {"code": body["code"], "message": said, "param": body.get("field") or None})
            if trial.last is not None:
                self._records.set_served(job, trial.last.step, trial.last.name)
        elif job.state is JobState.RUNNING:
            self._records.change(job.id, StateChange.INTERRUPT, epoch=trial.epoch)
            trial.rests = True

    def fail(self, id: str, error: Said) -> None:
        """Raises `WrongState` if it has ended."""
        with self._records.transaction():
            job = self._records.change(id, StateChange.FAIL, error=error)
            self._records.forget_served(job)
            self._records.add_event(id, "message", error["message"], level="error", data={"code": error["code"]})


def last_good(event: Said) -> str | None:
    """The checkpoint that is left of a job that failed by its own fault."""
    said: Said = event.get("training", {}).get("failed", {})
    return said.get("checkpoint") if said.get("code") not in _NO_ROOM else None


def is_end(event: Said) -> bool:
    """Whether a start of a job has ended with this."""
    return "refused" in event or any(kind in event["training"] for kind in _ENDS)


def step_of(folder: str) -> int:
    """The step of a checkpoint. Raises `SymbiosisError`."""
    found = re.fullmatch(r"step-(\d+)", Path(folder).name)
    if found is None:
        raise SymbiosisError("the engine names a checkpoint that is none")
    return int(found[1])
