"""Runs jobs, each on its own thread over a session of the trainer. Nothing of a job is stored after its end.

The caller stores what lasts: the job's owner, its progress, and whether it resumes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from symbiosis.adapters.parts import Adapter
from symbiosis.adapters.reader import read_adapter_from_memory
from symbiosis.common.throughput import Throughput
from symbiosis.errors import BadAdapter, BadCall, BadData, Closed, SymbiosisError, TooManyRequests
from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot
from symbiosis.finetuning.dataset import Dataset, read_dataset
from symbiosis.finetuning.loop import events
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.loop.train_loop import LoopResult, Validation, run
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.stats import JobRunnerStats
from symbiosis.finetuning.trainer import Trainer
from symbiosis.store.artifact_folders import ArtifactFolders, LocalFolders

_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Paths are the provider's own: a name from a tenant must never become one.

    `data`, `validation` and `resume` are found in `ArtifactFolders`; `checkpoints` and `final` are drafts there.
    """

    id: str
    """Chosen by the caller, unique among running jobs."""
    tenant: str
    adapter: Mapping[str, Any]
    """A PEFT config."""
    recipe: Recipe
    seed: int
    weight: float
    data: Path
    """In the format of `read_dataset`."""
    validation: Path | None
    evaluate_every: int | None
    checkpoints: Path
    """The folder of the checkpoints `step-N`."""
    checkpoint_every: int
    resume: Path | None
    """The checkpoint to resume from."""
    after: int
    """Steps done by `resume`."""
    final: Path
    """The folder of the finished adapter. A job with the same folder replaces this one."""
    serve_as: str | None
    serve_checkpoints: bool


Emit: TypeAlias = Callable[[str, events.Event], None]
ServeAdapter: TypeAlias = Callable[[str, Adapter, Path], int]
"""Serves an adapter under a name from memory; the folder has the same. Returns its generation once requests get it."""


class JobRunner:
    """Thread-safe. `emit` gets a job's id and its events, in order, on the job's thread."""

    def __init__(
        self,
        trainer: Trainer,
        emit: Emit,
        serve: ServeAdapter,
        folders: ArtifactFolders = LocalFolders(),  # noqa: B008 - stateless
    ) -> None:
        self._trainer, self._emit, self._serve, self._folders = trainer, emit, serve, folders
        self._lock = threading.Lock()
        self._running: dict[str, _Job] = {}
        self._closed = False
        self.stats = JobRunnerStats()

    def train(self, spec: JobSpec) -> None:
        """Start a job: `JobStarted` and one end follow, or `JobRejected`. A job with the same `final` is aborted first.

        Raises `BadCall` if the id is in use, `TooManyRequests` or `Closed`.
        """
        with self._lock:
            if self._closed:
                raise Closed("hosted training was closed")
            if spec.id in self._running:
                raise BadCall(f"there is a job {spec.id!r} already: choose another id")
            if len(self._running) >= self._trainer.config.max_sessions:
                raise TooManyRequests(f"{len(self._running)} jobs are running already")
            replaced = [job for job in self._running.values() if job.spec.final == spec.final]
            job = _Job(spec, self._trainer, self._emit_event, self._serve, self._folders, replaced)
            self._running[spec.id] = job
            self.stats = self.stats.add(running=1)
            job.start()
        for each in replaced:
            each.abort("another job replaces it")

    def stop(self, id: str) -> None:
        """End a job after the current step, with a checkpoint. Without effect if it has ended."""
        if (job := self._running.get(id)) is not None:
            job.stop()

    def abort(self, id: str) -> None:
        """End a job at once, with what is on disk. Without effect if it has ended."""
        if (job := self._running.get(id)) is not None:
            job.abort("it was aborted")

    def ids(self) -> list[str]:
        """Of the running jobs."""
        return list(self._running)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop all jobs; abort those that take longer than `timeout_s`."""
        with self._lock:
            self._closed = True
        jobs = list(self._running.values())
        for job in jobs:
            job.stop()
        until = time.monotonic() + timeout_s
        for job in jobs:
            job.join(max(0.0, until - time.monotonic()))
            job.abort("hosted training was closed")
        for job in jobs:
            job.join(timeout_s)

    def _emit_event(self, id: str, event: events.Event) -> None:
        """On the job's thread."""
        with self._lock:
            if isinstance(event, events.StepDone):
                self.stats = self.stats.add(steps=1, tokens=event.tokens)
            elif isinstance(event, events.JobEnd):
                del self._running[id]
                self.stats = self.stats.add(**{event.kind: 1, "running": -1})
        self._emit(id, event)


class _Job(threading.Thread):
    def __init__(
        self,
        spec: JobSpec,
        trainer: Trainer,
        emit: Emit,
        serve: ServeAdapter,
        folders: ArtifactFolders,
        replaced: list[_Job],
    ) -> None:
        super().__init__(name="symbiosis-job", daemon=True)
        self.spec, self._trainer, self._serve, self._folders, self._replaced = spec, trainer, serve, folders, replaced
        self._emit: Callable[[events.Event], None] = partial(emit, spec.id)
        self._stopping = False
        self._aborted: str | None = None
        self._session: TrainingSession | None = None
        self._interrupt = threading.Event()
        """Set by `stop` and `abort`: a checkpoint waits for the store no longer."""
        self._step, self._checkpoint = spec.after, spec.resume
        self._saved_step = spec.after

    def stop(self) -> None:
        self._stopping = True
        self._interrupt.set()
        if self._session is not None:
            self._session.stop()

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        self._interrupt.set()
        if self._session is not None:
            self._session.close()

    def run(self) -> None:
        for job in self._replaced:
            job.join()
        self._replaced = []
        end = self._run_to_end()
        if self._session is not None:  # before the event: its receiver may use the quota and move the files
            self._session.close()
            self._session.wait_for_files()
        self._emit(end)

    def _run_to_end(self) -> events.JobEnd:
        try:
            examples, validation = self._open()
        except Exception as error:  # noqa: BLE001 - every job ends with an event
            return events.JobRejected(_typed(error))
        try:
            self._emit(events.JobStarted(self.spec.recipe.total_steps(len(examples))))
            return self._train(examples, validation)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(_typed(error))

    def _open(self) -> tuple[Dataset, Validation | None]:
        """Open the session. Raises whatever is wrong with the spec."""
        spec = self.spec
        examples = self._read(spec.data)
        held_out = None if spec.validation is None else self._read(spec.validation)
        self._session = session = self._trainer.open(spec.tenant, spec.adapter, seed=spec.seed, weight=spec.weight)
        self._check_aborted()
        if self._stopping:
            session.stop()
        session.check(examples)
        validation = None
        if held_out is not None:
            session.check(held_out)
            if not any(example.labelled for example in held_out):
                raise BadData("the validation examples have no labels")
            on_loss = lambda step, loss: self._emit(events.ValidationDone(step, loss))  # noqa: E731
            validation = Validation(held_out, spec.evaluate_every, on_loss)
        if spec.resume is not None:
            with self._folders.hold(spec.resume) as folder:
                session.load(folder).result()
            if session.progress.steps != spec.after:
                raise BadAdapter(f"the checkpoint is of step {session.progress.steps}, not of {spec.after}")
        return examples, validation

    def _read(self, file: Path) -> Dataset:
        with self._folders.hold(file) as held:
            return read_dataset(held)

    def _check_aborted(self) -> None:
        if self._aborted is not None:
            raise Closed(f"the job was ended: {self._aborted}")

    def _train(self, examples: Dataset, validation: Validation | None) -> events.JobEnd:
        spec, session = self.spec, self._session
        assert session is not None
        self._throughput = Throughput(time.monotonic())
        last = run(
            session,
            examples,
            spec.recipe,
            after=spec.after,
            on_step=self._on_step,
            checkpoint=lambda step: self._folder(step) if step % spec.checkpoint_every == 0 else None,
            on_saved=self._on_saved,
            validation=validation,
        )
        self._check_aborted()
        if self._step < spec.recipe.total_steps(len(examples)):
            return self._save_and_stop(session)
        snapshots: list[AdapterSnapshot] = []
        session.save(spec.final, replace=True, keep=snapshots.append).result()
        folder, adapter = self._publish(spec.final), self._adapter(snapshots.pop())
        generation = None if spec.serve_as is None else self._serve(spec.serve_as, adapter, folder)
        loss, location = None if last is None else last.loss, self._folders.locate(folder)
        return events.JobSucceeded(self._step, loss, location, adapter.hash, generation)

    def _publish(self, draft: Path) -> Path:
        return self._folders.publish(draft, self._interrupt)

    def _save_and_stop(self, session: TrainingSession) -> events.JobStopped:
        folder = self._folder(self._step)
        if self._step > self.spec.after and self._saved_step != self._step:
            session.save(folder, optimizer=True, replace=True).result()
            self._checkpoint = self._publish(folder)
        return events.JobStopped(self._step, self._checkpoint_path())

    def _failed(self, error: SymbiosisError) -> events.JobFailed:
        if self._aborted is not None:
            error = Closed(f"the job was ended: {self._aborted}")
        elif not self._trainer.is_alive():  # not this job's fault: it may resume on another trainer
            error = Closed(f"hosted training has stopped: {error}")
        field = getattr(error, "field", None) or None
        return events.JobFailed(error.code, str(error), field, self._step, self._checkpoint_path())

    def _folder(self, step: int) -> Path:
        return self.spec.checkpoints / f"step-{step}"

    def _checkpoint_path(self) -> str | None:
        return None if self._checkpoint is None else self._folders.locate(self._checkpoint)

    def _on_step(self, result: LoopResult) -> None:
        self._step = result.step
        self._throughput.record(result.tokens, time.monotonic())
        self._emit(events.StepDone(**asdict(result), tokens_per_s=self._throughput.recent))

    def _on_saved(self, step: int, snapshot: AdapterSnapshot) -> None:
        folder, adapter, serves = self._publish(self._folder(step)), self._adapter(snapshot), None
        self._checkpoint, self._saved_step = folder, step
        if self.spec.serve_checkpoints and self.spec.serve_as is not None:
            try:
                self._serve(self.spec.serve_as, adapter, folder)
                serves = self.spec.serve_as
            except SymbiosisError as error:
                _log.warning("a checkpoint cannot be served: %s", error)
        self._emit(events.CheckpointSaved(step, self._folders.locate(folder), adapter.hash, serves))

    def _adapter(self, snapshot: AdapterSnapshot) -> Adapter:
        """Equal to the adapter read from its folder."""
        return read_adapter_from_memory(snapshot.config, snapshot.tensors, self._trainer.facts)


def _typed(error: Exception) -> SymbiosisError:
    """The error shown to the job's owner. Details of other exceptions go to the log only."""
    if isinstance(error, SymbiosisError):
        return error
    _log.error("a training job failed", exc_info=error)
    return SymbiosisError(f"the job failed: {type(error).__name__}")
