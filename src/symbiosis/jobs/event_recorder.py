"""Records the engine's events of a job: one transaction for each batch of events."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from symbiosis.adapters.names import split_qualified_name
from symbiosis.common.throughput import Throughput
from symbiosis.errors import StoreFull, StoreUnavailable, SymbiosisError
from symbiosis.jobs.atomic_files import write_atomic
from symbiosis.jobs.database import Database, JobRecord
from symbiosis.jobs.layout import JobsLayout, result_file_id
from symbiosis.jobs.states import JobState, StateChange

_END_KINDS = ("trained", "stopped", "failed")
_STORE_CODES = (StoreUnavailable.code, StoreFull.code)
_RETRYABLE_CODES = ("too_many_requests", "closed", "engine_lost", *_STORE_CODES)
"""The engine is at capacity or shutting down, or its store is unavailable: the job is queued again."""
_RESULT_NAME = "step_metrics.csv"
_RESULT_COLUMNS = ("step", "train_loss", "valid_loss", "learning_rate", "gradient_norm", "tokens")
Event = dict[str, Any]
CountSteps = Callable[[str, int, int], None]


class FinishedAdapters(Protocol):
    """Storage of finished adapters. `server.adapter_store` implements and documents it."""

    def new_location(self, tag: str) -> str: ...
    def add(self, owner: str | None, name: str, location: str) -> None: ...
    def discard(self, location: str) -> None: ...
    def has(self, owner: str | None, name: str) -> bool: ...
    def remove(self, owner: str | None, name: str) -> bool: ...
    def check_bytes(self, owner: str | None) -> None: ...
    def check_count(self, owner: str | None, expected: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """The last good checkpoint of a failed job, served as an adapter."""

    step: int
    name: str

    def __str__(self) -> str:
        return f"the last good checkpoint, of step {self.step}, is served as the adapter {self.name}"


@dataclass(slots=True)
class JobRun:
    """One run of a job at the engine."""

    job: str
    tenant: str
    epoch: int
    final: str
    """Location of the finished adapter."""
    steps: Throughput | None = None
    tokens: Throughput | None = None
    is_preempted: bool = False
    """Stopping, so that a job of another tenant can start."""
    served: ServedCheckpoint | None = None
    backs_off: bool = False
    """Ended because the engine is at capacity: the next start waits."""
    stale_folders: list[str] = field(default_factory=list)
    """Locations of checkpoints to remove after the transaction."""


class EventRecorder:
    """Thread-safe. `count_steps` receives a tenant, its optimizer steps and their tokens."""

    def __init__(self, db: Database, layout: JobsLayout, store: FinishedAdapters, count_steps: CountSteps) -> None:
        self._db, self._layout, self._store, self._count_steps = db, layout, store, count_steps

    def record(self, run: JobRun, events: list[Event]) -> JobRecord:
        """Raises `StorageFull` or `StoreUnavailable`; then nothing is recorded."""
        run.stale_folders.clear()
        with self._db.transaction():
            for event in events:
                self._record_event(self._db.get_job(run.job), run, event)
            job = self._db.get_job(run.job)
        for folder in run.stale_folders:
            self._layout.remove_checkpoint(folder)
        steps = [event["training"]["step"] for event in events if "step" in event.get("training", ())]
        if steps:
            self._count_steps(run.tenant, len(steps), sum(step["tokens"] for step in steps))
        return job

    def _record_event(self, job: JobRecord, run: JobRun, event: Event) -> None:
        if job.state.is_end:
            return
        if "refused" in event:
            self._record_failure(job, run, event["refused"])
            return
        kind, body = next(iter(event["training"].items()))
        if kind == "begun":
            self._db.update_job(job.id, steps=body["steps"])
            run.steps, run.tokens = Throughput(time.time()), Throughput(time.time())
        elif kind == "step":
            self._record_step(job, run, body)
        elif kind == "validation":
            message = f"Step {body['step']}/{job.steps}: validation loss={body['loss']:.4f}"
            data = {"step": body["step"], "total_steps": job.steps, "valid_loss": body["loss"]}
            self._db.add_event(job.id, "metrics", message, step=body["step"], data=data)
            self._db.update_job(job.id, figures={**job.figures, "valid_loss": body["loss"]})
        elif kind == "checkpoint":
            self._record_checkpoint(job, run, body["step"], body["folder"], body["hash"], body["serves"])
        elif kind == "stopped":
            if body["folder"] is not None:
                self._record_checkpoint(job, run, body["step"], body["folder"])
            if job.state is JobState.RUNNING:
                self._db.change_state(job.id, StateChange.INTERRUPT, epoch=run.epoch)
        elif kind == "failed":
            if body["checkpoint"] is not None:
                self._record_checkpoint(job, run, parse_step(body["checkpoint"]), body["checkpoint"])
            self._record_failure(job, run, body)
        elif kind == "trained":
            self._store.add(job.owner, job.name, body["folder"])
            self._db.change_state(job.id, StateChange.SUCCEED, epoch=run.epoch, hash=body["hash"], step=body["step"])
            if run.tokens is not None and run.tokens.mean:
                self._db.update_job(job.id, figures={**job.figures, "tokens_per_s": run.tokens.mean})
            self._db.clear_served(job, before=body["step"])
            self._write_results(job)
            self._db.add_event(job.id, "message", f"New fine-tuned model created: {job.name}")
            self._db.add_event(job.id, "message", "The job has successfully completed")

    def _record_step(self, job: JobRecord, run: JobRun, body: Event) -> None:
        now = time.time()
        finish = None
        if run.steps is not None and run.tokens is not None:
            run.steps.record(1, now)
            run.tokens.record(body["tokens"], now)
            finish = int(now + (body["total"] - body["step"]) / run.steps.recent)
        figures = {"train_loss": body["loss"], **{key: body[key] for key in ("learning_rate", "gradient_norm", "tokens_per_s")}}
        data = {"step": body["step"], "total_steps": body["total"], "tokens": body["tokens"], **figures}
        message = f"Step {body['step']}/{body['total']}: training loss={body['loss']:.4f}"
        self._db.add_event(job.id, "metrics", message, step=body["step"], data=data)
        self._db.update_job(
            job.id,
            step=body["step"],
            steps=body["total"],
            tokens=job.tokens + body["tokens"],
            figures={**job.figures, **figures, "finish_at": finish},
        )

    def _record_checkpoint(
        self, job: JobRecord, run: JobRun, step: int, folder: str, hash: str | None = None, serves: str | None = None
    ) -> None:
        metrics: Event = {"step": step}
        metrics |= {key: job.figures[key] for key in ("train_loss", "valid_loss") if key in job.figures}
        name = None if serves is None else split_qualified_name(serves)[1]
        if self._db.add_checkpoint(job, step, folder, hash, name, metrics):
            self._db.add_event(job.id, "message", f"Checkpoint created at step {step}", step=step, data={"step": step})
        if name is not None:
            self._db.clear_served(job, before=step)
        run.stale_folders += self._db.release_folders(job, before=step)

    def _record_failure(self, job: JobRecord, run: JobRun, body: Event) -> None:
        if body["code"] not in _RETRYABLE_CODES:
            message = body["message"] if run.served is None else f"{body['message']}; {run.served}"
            self.fail_job(job.id, {"code": body["code"], "message": message, "param": body.get("field") or None})
            if run.served is not None:
                self._db.set_served(job, run.served.step, run.served.name)
        elif job.state is JobState.RUNNING:
            self._db.change_state(job.id, StateChange.INTERRUPT, epoch=run.epoch)
            run.backs_off = True
            if body["code"] in _STORE_CODES:
                self._db.add_event(job.id, "message", f"The job waits: {body['message']}", level="warn")

    def _write_results(self, job: JobRecord) -> None:
        """Write and record the result file. A content without a record is removed at the next start."""
        content, id = format_metrics(self._db.list_metrics(job)).encode(), result_file_id(job.id)
        write_atomic(self._layout.file_path(id), content)
        self._db.add_file(id, job.tenant, _RESULT_NAME, len(content))

    def fail_job(self, id: str, error: Event) -> None:
        """Raises `WrongState` if the job has ended."""
        with self._db.transaction():
            job = self._db.change_state(id, StateChange.FAIL, error=error)
            self._db.clear_served(job)
            self._db.add_event(id, "message", error["message"], level="error", data={"code": error["code"]})


def format_metrics(metrics: Iterable[Event]) -> str:
    """CSV with a row for each step. A value that a step does not have is empty."""
    rows: dict[int, Event] = {}
    for each in metrics:
        rows.setdefault(each["step"], {}).update(each)
    text = io.StringIO()
    writer = csv.DictWriter(text, _RESULT_COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    return text.getvalue()


def find_failed_checkpoint(event: Event) -> str | None:
    """The last good checkpoint of a job that failed and is not retried."""
    body: Event = event.get("training", {}).get("failed", {})
    return body.get("checkpoint") if body.get("code") not in _RETRYABLE_CODES else None


def is_end(event: Event) -> bool:
    """Whether this event ends the run."""
    return "refused" in event or any(kind in event["training"] for kind in _END_KINDS)


def parse_step(folder: str) -> int:
    """The step of a checkpoint folder. Raises `SymbiosisError`."""
    found = re.fullmatch(r"step-(\d+)", Path(folder).name)
    if found is None:
        raise SymbiosisError("the engine sent an invalid checkpoint folder: expected step-N")
    return int(found[1])
