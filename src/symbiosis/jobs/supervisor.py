"""Runs jobs from the queue to their end: starts them at the engine, records its events, resumes them after a restart.

One asyncio task. Events are recorded on another thread, in one transaction, before the next batch is read.
A job that was running when a process was killed is queued again at the next start, with its last recorded checkpoint.
Each run has a number, its epoch, and its own folders: two runs never write to the same place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from symbiosis.adapters.names import qualify_name
from symbiosis.errors import EngineLost, QuotaExceeded, StoreUnavailable, SymbiosisError, UnknownAdapter
from symbiosis.jobs import recovery
from symbiosis.jobs.data_preparation import DataPreparer
from symbiosis.jobs.database import HYPERPARAMETERS, CheckpointRecord, Database, JobRecord
from symbiosis.jobs.errors import NameReserved, StorageFull, WrongState
from symbiosis.jobs.event_recorder import (
    CountSteps,
    Event,
    EventRecorder,
    FinishedAdapters,
    JobRun,
    ServedCheckpoint,
    find_failed_checkpoint,
    is_end,
    parse_step,
)
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters, TrainingPlan
from symbiosis.jobs.queue import JobLimits, QueuedJob, order_jobs, select_preempted, select_startable
from symbiosis.jobs.states import JobState, StateChange

_RETRY_S = 1.0
_BACKOFF_S = 5.0
"""Wait before the next start of a job that the engine had no capacity for."""
_STOP_TIMEOUT_S = 15.0
_MAX_EVENTS = 2000
_ANONYMOUS = "anonymous"
"""Tenant of all requests to a server without keys."""
_STEP_SUFFIX = re.compile(r"-step-[0-9]+$")
"""Added to the adapter's name for the checkpoint of a failed job."""
_PLAN_FIELDS = ("adapter", "recipe", "evaluate_every", "checkpoint_every", "serve_checkpoints")
_WAITING = (StorageFull, StoreUnavailable)
"""What fails so is tried again."""
_WAKE = object()
_T = TypeVar("_T")
_log = logging.getLogger("symbiosis")


class TrainingBackend(Protocol):
    """The engine's process. `server.engines.engine_client` implements and documents it."""

    async def open(self, body: dict[str, Any], inbox: asyncio.Queue[Any]) -> str: ...
    def forget(self, id: str) -> None: ...
    async def stop_training(self, id: str, *, at_once: bool = False) -> None: ...
    async def ask(self, op: str, **body: Any) -> dict[str, Any]: ...


class Supervisor:
    """One per server. `cancel`, `pause` and `resume` raise `WrongState`. `count_steps` is that of `EventRecorder`."""

    def __init__(
        self,
        db: Database,
        layout: JobsLayout,
        engine: TrainingBackend,
        store: FinishedAdapters,
        preparer: DataPreparer,
        limits: JobLimits,
        count_steps: CountSteps,
    ) -> None:
        self._db, self._layout, self._engine, self._store = db, layout, engine, store
        self._preparer, self._limits = preparer, limits
        self._recorder = EventRecorder(db, layout, store, count_steps)
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._runs: dict[str, JobRun] = {}
        self._last_start: dict[str, int] = {}  # by tenant
        self._start_numbers = itertools.count(1)
        self._backing_off: set[str] = set()
        self._changing: list[str] = []  # jobs being started, cancelled or paused
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._validations: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        recover = lambda: recovery.recover_jobs(self._db, self._layout, self._store)  # noqa: E731
        for job in await self._retry_while_full(lambda: asyncio.to_thread(recover)):
            self.validate(job)
        self._task = asyncio.create_task(self._run())
        self.wake()

    async def stop(self) -> None:
        """Running jobs save a checkpoint and are queued again. After a timeout they resume from an earlier one."""
        self._closing = True
        for key in list(self._runs):
            await self._stop_run(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._idle.wait()
        tasks = [*self._validations.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._preparer.close()

    def wake(self) -> None:
        """Check the queue for jobs to start."""
        self._inbox.put_nowait(_WAKE)

    def validate(self, job: JobRecord) -> None:
        """Validate a job's data in the background. The job is queued after it, or fails."""
        task = asyncio.create_task(self._validate(job))
        self._validations[job.id] = task
        task.add_done_callback(lambda _: self._validations.pop(job.id, None))

    async def cancel(self, id: str) -> JobRecord:
        return await self._halt(id, StateChange.CANCEL, "The job was cancelled")

    async def pause(self, id: str) -> JobRecord:
        return await self._halt(id, StateChange.PAUSE, "The job was paused")

    async def resume(self, id: str) -> JobRecord:
        job = await asyncio.to_thread(self._change_state, id, StateChange.RESUME, "The job was resumed: it is queued")
        self.wake()
        return job

    def busy_jobs(self) -> set[str]:
        """Jobs with a run at the engine, a change in progress or files to remove, in any recorded state. Thread-safe."""
        return {*self._changing, *(run.job for run in list(self._runs.values()))}

    def check_name(self, owner: str | None, name: str) -> None:
        """Raises `NameReserved` if a job will give this name to its adapter."""
        for job in self._db.list_jobs_named(owner, name, _STEP_SUFFIX.sub("", name)):
            if not job.state.is_end or job.id in self.busy_jobs():
                raise NameReserved(f"{name} is reserved for the adapter of job {job.id}: choose another, or cancel the job")

    def check_token_quota(self, tenant: str, tokens: int) -> None:
        """Raises `QuotaExceeded` if a job with this many dataset tokens exceeds the tenant's quota."""
        taken, most = self._db.sum_open_tokens(tenant), self._limits.tenant_tokens
        if taken + tokens > most:
            raise QuotaExceeded(f"token quota exceeded: {tokens} requested + {taken} open > {most} allowed. Try again later")

    async def check_memory(self, plan: TrainingPlan) -> None:
        """Raises `DoesNotFit` if the engine has no memory for the job's longest example."""
        await self._engine.ask("check_job", adapter=plan.adapter, length=plan.longest)

    def queue_positions(self) -> dict[str, int]:
        """Positions of queued jobs, from 1. Thread-safe."""
        ordered = order_jobs(self._db.list_queued(), self._count_running(), self._last_start)
        return {job.id: position for position, job in enumerate(ordered, 1)}

    def _count_running(self) -> Counter[str]:
        return Counter(run.tenant for run in list(self._runs.values()))

    @contextmanager
    def _mark_changing(self, id: str) -> Iterator[None]:
        self._changing.append(id)
        try:
            yield
        finally:
            self._changing.remove(id)

    async def _retry_while_full(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat the call until the disk, or the cluster's store, has free space and can be used."""
        while True:
            try:
                return await call()
            except _WAITING as error:
                _log.warning("a job waits for storage: %s", error)
                await asyncio.sleep(_RETRY_S)

    # Validation

    async def _validate(self, job: JobRecord) -> None:
        params, seed = Hyperparameters(**job.asked[HYPERPARAMETERS]), job.asked["seed"]
        try:
            plan = await self._retry_while_full(
                lambda: self._preparer.prepare(job.id, job.tenant, params, seed, in_background=True)
            )
            await self.check_memory(plan)
            await self._retry_while_full(lambda: asyncio.to_thread(self._enqueue, job, asdict(plan)))
            self._preparer.remove_sources(job.id)
        except WrongState:  # cancelled meanwhile
            await asyncio.to_thread(self._layout.remove_job, job.id)
        except Exception as error:  # noqa: BLE001 - the job fails with any error
            await self._fail(job.id, error)
            await asyncio.to_thread(self._layout.remove_job, job.id)
        self.wake()

    def _enqueue(self, job: JobRecord, plan: dict[str, Any]) -> None:
        with self._db.transaction():
            self.check_token_quota(job.tenant, plan["tokens"])
            self._db.change_state(job.id, StateChange.VALIDATE, plan=plan, steps=plan["steps"])
            self._db.add_event(job.id, "message", "Files validated, moving job to queued state")

    # State changes

    def _change_state(self, id: str, change: StateChange, message: str) -> JobRecord:
        with self._db.transaction():
            job = self._db.change_state(id, change)
            self._db.add_event(id, "message", message)
            if job.state.is_end:
                self._db.clear_served(job)
            return job

    async def _halt(self, id: str, change: StateChange, message: str) -> JobRecord:
        with self._mark_changing(id):
            job = await asyncio.to_thread(self._change_state, id, change, message)
            if job.state.is_end:
                self._preparer.cancel(id)
            runs = [key for key, run in self._runs.items() if run.job == id]
            for key in runs:
                await self._stop_run(key, at_once=job.state.is_end)
            if not runs and id not in self._validations:
                await self._clean_up(job)
        self.wake()
        return job

    async def _fail(self, id: str, error: Exception) -> None:
        """Does nothing if the job has ended."""
        with suppress(WrongState):
            await self._retry_while_full(lambda: asyncio.to_thread(self._recorder.fail_job, id, _describe(error)))

    async def _stop_run(self, key: str, *, at_once: bool = False) -> None:
        """Stop a run after its current step with a checkpoint, or `at_once` without one."""
        with suppress(EngineLost):
            await self._engine.stop_training(key, at_once=at_once)

    async def _clean_up(self, job: JobRecord) -> None:
        """Unload the adapter of a job that ended without success and remove the job's folder. Idempotent.

        Does nothing if the job has not ended. After a kill, `recover_jobs` does the same at the next start.
        """
        if not job.state.is_end:
            return
        if job.state is not JobState.SUCCEEDED:
            try:
                await self._engine.ask("unload", name=qualify_name(job.owner, job.name))
            except UnknownAdapter:
                pass  # neither a checkpoint nor a late result is served
            except SymbiosisError:
                _log.exception("the adapter of the ended job %s could not be unloaded", job.id)
        await asyncio.to_thread(self._layout.remove_job, job.id)

    # The loop

    async def _run(self) -> None:
        while True:
            batch = [await self._inbox.get()]
            while not self._inbox.empty() and len(batch) < _MAX_EVENTS:
                batch.append(self._inbox.get_nowait())
            by_run: dict[str, list[Event]] = {}
            for event in batch:
                if isinstance(event, dict):
                    by_run.setdefault(event["id"], []).append(event)
            can_start = any(event is _WAKE for event in batch)
            for key, events in by_run.items():
                try:
                    can_start |= await self._handle_events(key, events)
                except Exception:  # noqa: BLE001 - all jobs depend on this task
                    _log.exception("events of a job are lost")
            if any(event is None for event in batch):
                self._idle.set()
                for task in self._validations.values():
                    task.cancel()
                return  # the engine is lost, and this process ends
            if can_start and not self._closing:
                await self._start_jobs()

    # Starting

    async def _start_jobs(self) -> None:
        """On any failure, tries again later."""
        try:
            running = self._count_running()
            ordered = order_jobs(await self._list_startable(), running, self._last_start)
            for job in select_startable(ordered, running, self._limits):
                with self._mark_changing(job.id), suppress(WrongState):  # cancelled or paused meanwhile
                    await self._start_job(job.id)
            await self._preempt_jobs()
        except EngineLost:
            return
        except Exception as error:  # noqa: BLE001 - all jobs depend on this task
            _log.warning("no job can be started now: %s", error, exc_info=None if isinstance(error, _WAITING) else error)
            asyncio.get_running_loop().call_later(_RETRY_S, self.wake)

    async def _list_startable(self) -> list[QueuedJob]:
        excluded = self.busy_jobs() | self._backing_off
        return [job for job in await asyncio.to_thread(self._db.list_queued) if job.id not in excluded]

    async def _preempt_jobs(self) -> None:
        """Stop the youngest of a tenant's several runs for each tenant that has none. Stopped jobs are queued again."""
        queued = await self._list_startable()
        preempted = Counter(run.tenant for run in self._runs.values() if run.is_preempted)
        for tenant in select_preempted(queued, self._count_running(), preempted, self._limits):
            runs = (key for key, run in self._runs.items() if run.tenant == tenant and not run.is_preempted)
            youngest = max(runs, key=int)
            self._runs[youngest].is_preempted = True
            await self._stop_run(youngest)

    async def _start_job(self, id: str) -> None:
        """Raises `WrongState`, `StorageFull`, `StoreUnavailable` or `EngineLost`; any other error fails the job."""
        job, checkpoint = await asyncio.to_thread(recovery.begin_run, self._db, self._layout, id)
        try:
            await asyncio.to_thread(self._store.check_bytes, job.owner)
            kept = None if checkpoint is None else checkpoint.folder
            run = await asyncio.to_thread(self._layout.make_run, job.id, job.epoch, kept)
            data, validation = await asyncio.to_thread(self._layout.place_data, job.id)
            await self._send_job(job, checkpoint, {"data": data, "validation": validation, "checkpoints": run})
        except (*_WAITING, EngineLost):
            with suppress(WrongState):
                await self._retry_while_full(
                    lambda: asyncio.to_thread(self._db.change_state, id, StateChange.INTERRUPT, epoch=job.epoch)
                )
            raise
        except Exception as error:  # noqa: BLE001 - other jobs are not affected
            await self._fail(id, error)
            await self._clean_up(await asyncio.to_thread(self._db.get_job, id))

    async def _send_job(self, job: JobRecord, checkpoint: CheckpointRecord | None, locations: dict[str, str | None]) -> None:
        assert job.plan is not None
        final = self._store.new_location(f"{job.id}-{job.epoch}")
        body = {
            "op": "train",
            "tenant": job.tenant or _ANONYMOUS,
            **{
                name: job.plan[name]
                for name in ("adapter", "recipe", "evaluate_every", "checkpoint_every", "serve_checkpoints")
            },
            "seed": job.plan["recipe"]["seed"],
            "weight": 1.0,
            **locations,
            "resume": None if checkpoint is None else checkpoint.folder,
            "after": 0 if checkpoint is None else checkpoint.step,
            "final": final,
            "serve_as": qualify_name(job.owner, job.name),
        }
        key = await self._engine.open(body, self._inbox)
        self._runs[key] = JobRun(job.id, job.tenant, job.epoch, final)
        self._idle.clear()
        self._last_start[job.tenant] = next(self._start_numbers)
        now = await asyncio.to_thread(self._db.get_job, job.id)
        if self._closing or now.state is not JobState.RUNNING:  # cancelled or paused while it was sent
            await self._stop_run(key, at_once=now.state.is_end)

    # Events of the engine

    async def _handle_events(self, key: str, events: list[Event]) -> bool:
        """Record events of one run. Returns whether the run has ended."""
        run = self._runs.get(key)
        if run is None:
            return False
        try:
            *before, last = events
            if (checkpoint := find_failed_checkpoint(last)) is not None:  # served before the failure is visible
                job = await self._record(run, before)
                run.served = await self._serve_checkpoint(job, checkpoint)
                before = []
            job = await self._record(run, [*before, last])
        except Exception as error:  # noqa: BLE001 - other jobs are not affected
            _log.exception("events of the job %s could not be recorded", run.job)
            await self._fail(run.job, error)
            await self._stop_run(key)
            job = await asyncio.to_thread(self._db.get_job, run.job)
        if not any(map(is_end, events)):
            return False
        try:
            await self._clean_up(job)
        finally:  # after the clean-up: until then the name is reserved
            del self._runs[key]
            self._engine.forget(key)
            if not self._runs:
                self._idle.set()
        if not job.state.is_end:  # a cancellation during the clean-up still saw the run
            job = await asyncio.to_thread(self._db.get_job, run.job)
            await self._clean_up(job)
        if run.backs_off:
            self._backing_off.add(job.id)
            asyncio.get_running_loop().call_later(_BACKOFF_S, self._end_backoff, job.id)
        if job.state is not JobState.SUCCEEDED:
            await asyncio.to_thread(self._store.discard, run.final)
        return True

    async def _record(self, run: JobRun, events: list[Event]) -> JobRecord:
        return await self._retry_while_full(lambda: asyncio.to_thread(self._recorder.record, run, events))

    def _end_backoff(self, id: str) -> None:
        self._backing_off.discard(id)
        self.wake()

    async def _serve_checkpoint(self, job: JobRecord, checkpoint: str) -> ServedCheckpoint | None:
        """Serve the last good checkpoint of a failed job as an adapter. None if that fails."""
        if job.state.is_end:
            return None
        try:
            step = parse_step(checkpoint)
            served = ServedCheckpoint(step, f"{job.name}-step-{step}")
            location, folders = self._store.new_location(f"{job.id}-step-{step}"), self._layout.folders
            await self._retry_while_full(lambda: asyncio.to_thread(recovery.copy_adapter, folders, checkpoint, location))
            await self._engine.ask("load", name=qualify_name(job.owner, served.name), folder=location, replace=True)
            await asyncio.to_thread(self._store.add, job.owner, served.name, location)
        except (SymbiosisError, OSError):
            _log.exception("the last good checkpoint of the job %s cannot be served", job.id)
            return None
        return served


def _describe(error: Exception) -> dict[str, Any]:
    """The `error` field of a job. Internal errors are logged and not shown."""
    if isinstance(error, SymbiosisError):
        return {"code": error.code, "message": str(error), "param": getattr(error, "field", "") or None}
    _log.error("a job failed", exc_info=error)
    return {"code": "internal_error", "message": "internal server error: see the server's log", "param": None}
