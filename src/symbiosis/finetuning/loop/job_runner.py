"""Jobs that run: a thread each, over a session of the host. Nothing of them is remembered once they have ended.

What lasts (who asked, how far it got, whether it is to go on) is kept by whoever orders them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from symbiosis.adapters.parts import Adapter
from symbiosis.adapters.reader import read_adapter_from_memory
from symbiosis.common.throughput import Throughput
from symbiosis.errors import BadAdapter, BadCall, BadData, Closed, SymbiosisError, TooManyRequests
from symbiosis.finetuning import dataset
from symbiosis.finetuning.loop import events
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.loop.train_loop import LoopResult, Validation, run
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.trained_adapter import AdapterSnapshot
from symbiosis.finetuning.trainer import Trainer

_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Paths are the provider's own: a name from a tenant must never become one."""

    id: str
    """Chosen by whoever asks; no two at once."""
    tenant: str
    adapter: Mapping[str, Any]
    """A PEFT config."""
    recipe: Recipe
    seed: int
    weight: float
    data: Path
    """As `dataset.read` reads it."""
    validation: Path | None
    evaluate_every: int | None
    checkpoints: Path
    """Where `step-N` are written, with all that is needed to go on."""
    checkpoint_every: int
    resume: Path | None
    """A checkpoint to go on from, and the steps done by it."""
    after: int
    final: Path
    """Where the adapter is written in the end. There is no other job with the same."""
    serve_as: str | None
    serve_checkpoints: bool


class AdapterServer(Protocol):
    def __call__(self, name: str, adapter: Adapter, folder: Path) -> int:
        """Serve an adapter under a name from memory; `folder` has it too. Returns its generation, once requests get it."""


@dataclass(frozen=True, slots=True)
class JobRunnerStats:
    running: int = 0
    trained: int = 0
    stopped: int = 0
    failed: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    """Labels that were learned from, by steps that are done."""


class JobRunner:
    """Any thread may order and stop. `out` gets a job's id and what happened, in order, from the job's thread."""

    def __init__(self, host: Trainer, out: Callable[[str, events.Event], None], serve: AdapterServer) -> None:
        self._host, self._out, self._serve = host, out, serve
        self._lock = threading.Lock()
        self._running: dict[str, _Job] = {}
        self._closed = False
        self.stats = JobRunnerStats()

    def train(self, order: JobSpec) -> None:
        """`Begun` and one end will follow, or `Refused`. A job that writes to the same folder is ended: this takes over.

        Raises `BadCall` if there is a job of this id, `TooManyRequests` or `Closed`.
        """
        with self._lock:
            if self._closed:
                raise Closed("hosted training was closed")
            if order.id in self._running:
                raise BadCall(f"there is a job {order.id!r} already: choose another id")
            if len(self._running) >= self._host.config.max_sessions:
                raise TooManyRequests(f"{len(self._running)} jobs are running already")
            older = [job for job in self._running.values() if job.order.final == order.final]
            job = _Job(self, self._host, self._serve, order, older)
            self._running[order.id] = job
            self._count(running=1)
        for each in older:
            each.abandon("another took over")
        job.start()

    def stop(self, id: str) -> None:
        """Let a job end after the step under way, with a checkpoint. Nothing happens if it has ended."""
        job = self._running.get(id)
        if job is not None:
            job.stop()

    def stop_all(self) -> None:
        for job in list(self._running.values()):
            job.stop()

    def abandon(self, id: str) -> None:
        """Nobody wants a job any more: end it at once, as it is on disk."""
        job = self._running.get(id)
        if job is not None:
            job.abandon("nobody waits for it any more")

    def ids(self) -> list[str]:
        """Of the jobs that have not ended."""
        return list(self._running)

    def close(self, patience_s: float = 30.0) -> None:
        """Stop all jobs; those that take longer are abandoned."""
        with self._lock:
            self._closed = True
        self.stop_all()
        until = time.monotonic() + patience_s
        jobs = list(self._running.values())
        for job in jobs:
            job.wait(max(0.0, until - time.monotonic()))
            job.abandon("hosted training was closed")
        for job in jobs:
            job.wait(patience_s)

    # For jobs, on their threads

    def say(self, id: str, event: events.Event) -> None:
        with self._lock:
            if isinstance(event, events.StepDone):
                self._count(steps=1, tokens=event.tokens)
            ended = _ENDS.get(type(event))
            if ended is not None:
                del self._running[id]
                self._count(**{ended: 1, "running": -1})
        self._out(id, event)

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self.stats, name) for name in JobRunnerStats.__slots__}
        self.stats = JobRunnerStats(**{name: value + more.get(name, 0) for name, value in counted.items()})


_ENDS = {
    events.JobSucceeded: "trained",
    events.JobStopped: "stopped",
    events.JobFailed: "failed",
    events.JobRejected: "refused",
}


class _Job:
    """One job and its thread."""

    def __init__(self, jobs: JobRunner, host: Trainer, serve: AdapterServer, order: JobSpec, older: list[_Job]) -> None:
        self._jobs, self._host, self._serve, self.order = jobs, host, serve, order
        self._older = older
        self._stopping = False
        self._abandoned: str | None = None
        self._session: TrainingSession | None = None
        self._step = order.after
        self._checkpoint = order.resume
        self._thread = threading.Thread(target=self._run, name="symbiosis-job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def stop(self) -> None:
        self._stopping = True
        session = self._session
        if session is not None:
            session.stop()

    def abandon(self, why: str) -> None:
        self._abandoned = self._abandoned or why
        session = self._session
        if session is not None:
            session.close()

    def _say(self, event: events.Event) -> None:
        self._jobs.say(self.order.id, event)

    def _run(self) -> None:
        for older in self._older:
            older.wait()
        self._older = []
        end = self._to_its_end()
        if self._session is not None:
            self._session.close()  # first: who hears of the end may want its place,
            self._session.wait_for_files()  # and puts away what it has written
        self._say(end)

    def _to_its_end(self) -> events.Event:
        try:
            examples, validation = self._begin()
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for it
            return events.JobRejected(_typed(error))
        try:
            self._say(events.JobStarted(self.order.recipe.total(len(examples))))
            return self._train(examples, validation)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(_typed(error))

    def _begin(self) -> tuple[dataset.Dataset, Validation | None]:
        """All that can be wrong with an order is found here."""
        order = self.order
        examples = dataset.read(order.data)
        held_out = None if order.validation is None else dataset.read(order.validation)
        self._session = session = self._host.open(order.tenant, order.adapter, seed=order.seed, weight=order.weight)
        if self._abandoned is not None:
            raise Closed(f"the job was ended: {self._abandoned}")
        if self._stopping:
            session.stop()
        session.check(examples)
        validation = None
        if held_out is not None:
            session.check(held_out)
            if not any(example.labelled for example in held_out):
                raise BadData("the examples to validate with have no labels")
            validation = Validation(held_out, order.evaluate_every, self._on_validation)
        if order.resume is not None:
            session.load(order.resume).result()
            if session.progress.steps != order.after:
                raise BadAdapter(f"the checkpoint is of step {session.progress.steps}, not of {order.after}")
        return examples, validation

    def _train(self, examples: dataset.Dataset, validation: Validation | None) -> events.Event:
        order, session = self.order, self._session
        assert session is not None
        rate = Throughput(time.monotonic())
        last = run(
            session,
            examples,
            order.recipe,
            after=order.after,
            on_step=lambda done: self._on_step(done, rate),
            checkpoint=lambda step: self._folder(step) if step % order.checkpoint_every == 0 else None,
            on_saved=self._on_saved,
            validation=validation,
        )
        if self._abandoned is not None:
            raise Closed(f"the job was ended: {self._abandoned}")
        if self._step < order.recipe.total(len(examples)):
            return self._stop(session)
        kept: list[AdapterSnapshot] = []
        session.save(order.final, replace=True, keep=kept.append).result()
        adapter = self._adapter(kept.pop())
        generation = None if order.serve_as is None else self._serve(order.serve_as, adapter, order.final)
        return events.JobSucceeded(self._step, None if last is None else last.loss, str(order.final), adapter.hash, generation)

    def _stop(self, session: TrainingSession) -> events.Event:
        folder = self._folder(self._step)
        if self._step > self.order.after and self._checkpoint != folder:
            session.save(folder, optimizer=True, replace=True).result()
            self._checkpoint = folder
        return events.JobStopped(self._step, _text(self._checkpoint))

    def _folder(self, step: int) -> Path:
        return self.order.checkpoints / f"step-{step}"

    def _on_step(self, done: LoopResult, rate: Throughput) -> None:
        self._step = done.step
        rate.record(done.tokens, time.monotonic())
        self._say(
            events.StepDone(done.step, done.total, done.loss, done.learning_rate, done.gradient_norm, done.tokens, rate.recent)
        )

    def _on_validation(self, step: int, loss: float) -> None:
        self._say(events.ValidationDone(step, loss))

    def _on_saved(self, step: int, made: AdapterSnapshot) -> None:
        folder, adapter, serves = self._folder(step), self._adapter(made), None
        self._checkpoint = folder
        if self.order.serve_checkpoints and self.order.serve_as is not None:
            try:
                self._serve(self.order.serve_as, adapter, folder)
                serves = self.order.serve_as
            except SymbiosisError as error:
                _log.warning("a checkpoint cannot be served: %s", error)
        self._say(events.CheckpointSaved(step, str(folder), adapter.hash, serves))

    def _adapter(self, made: AdapterSnapshot) -> Adapter:
        """What `adapters.folder.read` gives of its folder."""
        return read_adapter_from_memory(made.config, made.tensors, self._host.facts)

    def _failed(self, error: SymbiosisError) -> events.JobFailed:
        if self._abandoned is not None:
            error = Closed(f"the job was ended: {self._abandoned}")
        elif not self._host.is_alive():  # nobody's fault: whoever ordered it may let it go on elsewhere
            error = Closed(f"hosted training has stopped: {error}")
        field = getattr(error, "field", None) or None
        return events.JobFailed(error.code, str(error), field, self._step, _text(self._checkpoint))


def _typed(error: Exception) -> SymbiosisError:
    """What its owner is told; what is no error of ours is for the log."""
    if isinstance(error, SymbiosisError):
        return error
    _log.error("a training job failed", exc_info=error)
    return SymbiosisError(f"the job failed: {type(error).__name__}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
