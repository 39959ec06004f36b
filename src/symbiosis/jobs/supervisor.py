"""Jobs from the queue to their ends: starts them at the engine, records what it says, goes on after any restart.

One asyncio task. What the engine says is written in transactions, on another thread, before the next is looked at.
Whatever is killed, and whenever: a job that was running is in the queue again at the next start, with its last
recorded checkpoint. Each start has a number, its epoch, and folders of its own: two never write to the same place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.adapters.names import qualify_name
from symbiosis.errors import EngineLost, QuotaExceeded, SymbiosisError, UnknownAdapter
from symbiosis.jobs.atomic_files import to_disk, told
from symbiosis.jobs.data_preparation import DataPreparer
from symbiosis.jobs.database import CheckpointRecord, Database, JobRecord
from symbiosis.jobs.errors import NameReserved, StorageFull, WrongState
from symbiosis.jobs.event_recorder import (
    AdapterShelf,
    Count,
    EventRecorder,
    JobRun,
    LastEvent,
    Said,
    is_end,
    last_good,
    step_of,
)
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.queue import JobLimits, crowded, order, startable
from symbiosis.jobs.states import JobState, StateChange

_RETRY_S = 1.0
_REST_S = 5.0
"""A job that the engine had no room for tries again after so long."""
_STOP_S = 15.0
_BATCH = 2000
_NOBODY = "everybody"
"""Where there are no keys, all who ask are one tenant without a name."""
_OF_STEP = re.compile(r"-step-[0-9]+$")
"""What a job adds to its adapter's name if it fails, and its last good checkpoint is served."""
_T = TypeVar("_T")
_log = logging.getLogger("symbiosis")


class TrainingBackend(Protocol):
    """The engine's process, as `server.remote` reaches it."""

    async def open(self, body: dict[str, Any], inbox: asyncio.Queue[Any] | None = None) -> tuple[str, asyncio.Queue[Any]]: ...

    def forget(self, id: str) -> None: ...

    async def stop_training(self, id: str, *, at_once: bool = False) -> None: ...

    async def ask(self, op: str, **body: Any) -> dict[str, Any]: ...


class Supervisor:
    """One for a server. `count` and `clock` are those of `EventRecorder`."""

    def __init__(
        self,
        records: Database,
        folder: JobsLayout,
        engine: TrainingBackend,
        shelf: AdapterShelf,
        preparer: DataPreparer,
        limits: JobLimits,
        count: Count = lambda tenant, steps, tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._folder, self._engine, self._shelf = records, folder, engine, shelf
        self._preparer, self._limits = preparer, limits
        self._notes = EventRecorder(records, shelf, count, clock)
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._live: dict[str, JobRun] = {}
        self._begun: dict[str, int] = {}  # when a tenant's last job was started
        self._numbers = itertools.count(1)
        self._resting: set[str] = set()
        self._handled: list[str] = []  # jobs that are being started, or ended by hand
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._validating: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        for job in await asyncio.to_thread(self._take_up):
            self.validate(job)
        self._task = asyncio.create_task(self._run())
        self.wake()

    async def stop(self) -> None:
        """Running jobs save where they are and are queued again; what does not answer in time goes on from before."""
        self._closing = True
        for id in list(self._live):
            await self._tell_stop(id)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._idle.wait()
        tasks = [*self._validating.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._preparer.close()

    def wake(self) -> None:
        """Something may be started."""
        self._inbox.put_nowait(_WAKE)

    def validate(self, job: JobRecord) -> None:
        """Read a job's data beside everything else; then it is queued, or has failed."""
        task = asyncio.create_task(self._validate(job))
        self._validating[job.id] = task
        task.add_done_callback(lambda _: self._validating.pop(job.id, None))

    async def cancel(self, id: str) -> JobRecord:
        """Raises `WrongState`."""
        return await self._end_by_hand(id, StateChange.CANCEL, "The job was cancelled")

    async def pause(self, id: str) -> JobRecord:
        """Raises `WrongState`."""
        return await self._end_by_hand(id, StateChange.PAUSE, "The job was paused")

    async def resume(self, id: str) -> JobRecord:
        """Raises `WrongState`."""
        job = await asyncio.to_thread(self._change, id, StateChange.RESUME, "The job was resumed: it is queued")
        self.wake()
        return job

    def busy(self) -> set[str]:
        """Jobs that the engine may hear of, or has not ended, or that are not put away, whatever is recorded of them."""
        return {*self._handled, *(each.job for each in list(self._live.values()))}  # any thread may ask

    @contextmanager
    def _handling(self, id: str) -> Iterator[None]:
        """It is busy meanwhile."""
        self._handled.append(id)
        try:
            yield
        finally:
            self._handled.remove(id)

    def check_name(self, owner: str | None, name: str) -> None:
        """Before something else is served by this name. Raises `NameReserved` if a job will give it to its adapter."""
        for job in self._records.jobs_named(owner, name, _OF_STEP.sub("", name)):
            if not job.state.is_end or job.id in self.busy():
                raise NameReserved(
                    f"{name} is reserved for the adapter of the job {job.id}: choose another name, or cancel the job"
                )

    def positions(self) -> dict[str, int]:
        """Of queued jobs, from 1 on."""
        ordered = order(self._records.waiting(), self._running(), self._begun)
        return {each.id: place for place, each in enumerate(ordered, 1)}

    def _running(self) -> Counter[str]:
        return Counter(each.tenant for each in list(self._live.values()))  # as above

    # Data

    async def _validate(self, job: JobRecord) -> None:
        wishes = Hyperparameters(**job.asked["wishes"])
        try:
            seed = job.asked["seed"]
            found = await self._surely(lambda: self._preparer.prepare(job.id, job.tenant, wishes, seed, large=True))
            await self._surely(lambda: asyncio.to_thread(self._validated, job, found.plan.to_json()))
            self._preparer.release(job.id)
        except WrongState:  # cancelled meanwhile
            await asyncio.to_thread(self._folder.remove_work, job.id)
        except Exception as error:  # noqa: BLE001 - the job ends with it, whatever it is
            await self._fail(job.id, error)
            await asyncio.to_thread(self._folder.remove_work, job.id)
        self.wake()

    async def _surely(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Once the disk takes it."""
        while True:
            try:
                return await call()
            except StorageFull as error:
                _log.warning("something of a job waits: %s", error)
                await asyncio.sleep(_RETRY_S)

    def check_tokens(self, tenant: str, tokens: int) -> None:
        """Before a job's data is recorded. Raises `QuotaExceeded`."""
        taken, most = self._records.open_tokens(tenant), self._limits.tenant_tokens
        if taken + tokens > most:
            raise QuotaExceeded(
                f"the data has {tokens} tokens, that of your jobs that have not ended {taken}: {most} may be. Try again later"
            )

    def _validated(self, job: JobRecord, plan: dict[str, Any]) -> None:
        with self._records.transaction():
            self.check_tokens(job.tenant, plan["tokens"])
            self._records.change(job.id, StateChange.VALIDATE, plan=plan, steps=plan["steps"])
            self._records.add_event(job.id, "message", "Files validated, moving job to queued state")

    # States

    def _change(self, id: str, change: StateChange, message: str) -> JobRecord:
        with self._records.transaction():
            job = self._records.change(id, change)
            self._records.add_event(id, "message", message)
            if job.state.is_end:
                self._records.forget_served(job)
            return job

    async def _end_by_hand(self, id: str, change: StateChange, message: str) -> JobRecord:
        with self._handling(id):
            job = await asyncio.to_thread(self._change, id, change, message)
            if job.state.is_end:
                self._preparer.give_up(id)
            live = [key for key, each in self._live.items() if each.job == id]
            for key in live:
                await self._tell_stop(key, at_once=job.state.is_end)
            if not live and id not in self._validating:
                await self._put_away(job)
        self.wake()
        return job

    async def _fail(self, id: str, error: Exception) -> None:
        """Nothing happens if it has ended."""
        with suppress(WrongState):
            await self._surely(lambda: asyncio.to_thread(self._notes.fail, id, _told(error)))

    async def _tell_stop(self, key: str, *, at_once: bool = False) -> None:
        """`at_once`: nobody wants what it would still do."""
        with suppress(EngineLost):
            await self._engine.stop_training(key, at_once=at_once)

    # Starting

    def _take_up(self) -> list[JobRecord]:
        """What an earlier process left. Returns the jobs whose data is to be read."""
        for job in self._records.jobs_in(JobState.RUNNING):
            with self._records.transaction():
                self._records.change(job.id, StateChange.INTERRUPT)
                self._records.add_event(job.id, "message", "The server was restarted: the job is queued again", level="warn")
            self._shelf.remove(job.owner, job.name)  # if it was put there, but not recorded to have ended
        unfinished = self._records.jobs_in(JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED)
        for job in unfinished:
            self._records.forget_served(job)  # the engine is another one
        self._records.forget_files(self._records.file_ids() - self._folder.file_ids())  # half deleted
        self._folder.remove_others(files=self._records.file_ids(), jobs={job.id for job in unfinished})
        return [job for job in unfinished if job.state is JobState.VALIDATING]

    async def _run(self) -> None:
        while True:
            batch = [await self._inbox.get()]
            while not self._inbox.empty() and len(batch) < _BATCH:
                batch.append(self._inbox.get_nowait())
            by_try: dict[str, list[Said]] = {}
            for event in batch:
                if isinstance(event, dict):
                    by_try.setdefault(event["id"], []).append(event)
            looks = any(event is _WAKE for event in batch)
            for id, events in by_try.items():
                try:
                    looks |= await self._take(id, events)
                except Exception:  # noqa: BLE001 - everybody's jobs wait for this task
                    _log.exception("what the engine said of a job is lost")
            if any(event is None for event in batch):
                self._idle.set()
                for task in self._validating.values():
                    task.cancel()
                return  # the engine is lost, and so is this process
            if looks and not self._closing:
                await self._start_some()

    async def _start_some(self) -> None:
        """Whatever goes wrong, the next look is not the last."""
        try:
            busy = self.busy() | self._resting
            waiting = [each for each in await asyncio.to_thread(self._records.waiting) if each.id not in busy]
            running = self._running()
            for each in startable(order(waiting, running, self._begun), running, self._limits):
                with self._handling(each.id), suppress(WrongState):  # cancelled or paused meanwhile
                    await self._begin(each.id)
            await self._make_room()
        except EngineLost:
            return
        except Exception as error:  # noqa: BLE001 - everybody's jobs wait for this task
            _log.warning("no job can be started now", exc_info=None if isinstance(error, StorageFull) else error)
            asyncio.get_running_loop().call_later(_RETRY_S, self.wake)

    async def _make_room(self) -> None:
        """A tenant without a running job does not wait for the end of others' second ones: those go on later."""
        busy = self.busy() | self._resting
        waiting = [each for each in await asyncio.to_thread(self._records.waiting) if each.id not in busy]
        leaving = Counter(each.tenant for each in self._live.values() if each.yields)
        for tenant in crowded(waiting, self._running(), leaving, self._limits):
            youngest = max((id for id, each in self._live.items() if each.tenant == tenant and not each.yields), key=int)
            self._live[youngest].yields = True
            await self._tell_stop(youngest)

    async def _begin(self, id: str) -> None:
        """Raises `WrongState`, `StorageFull` or `EngineLost`; if the job cannot be started for another reason, it fails."""
        job, last = await asyncio.to_thread(self._noted_start, id)
        try:
            await asyncio.to_thread(self._shelf.check_bytes, job.owner)
            await asyncio.to_thread(self._make_place, job, last)
            await self._send(job, last)
        except (StorageFull, EngineLost):
            with suppress(WrongState):
                await self._surely(lambda: asyncio.to_thread(self._records.change, id, StateChange.INTERRUPT, epoch=job.epoch))
            raise
        except Exception as error:  # noqa: BLE001 - this job's, and no other's
            await self._fail(id, error)
            await self._put_away(await asyncio.to_thread(self._records.job, id))

    async def _send(self, job: JobRecord, last: CheckpointRecord | None) -> None:
        assert job.plan is not None
        final = self._shelf.place(f"{job.id}-{job.epoch}")
        validation = self._folder.data(job.id, "validation_file")
        body = {
            "op": "train",
            "tenant": job.tenant or _NOBODY,
            "adapter": job.plan["adapter"],
            "recipe": job.plan["recipe"],
            "seed": job.plan["recipe"]["seed"],
            "weight": 1.0,
            "data": str(self._folder.data(job.id, "training_file")),
            "validation": str(validation) if validation.exists() else None,
            "evaluate_every": job.plan["evaluate_every"],
            "checkpoints": str(self._folder.checkpoints(job.id, job.epoch)),
            "checkpoint_every": job.plan["checkpoint_every"],
            "resume": None if last is None else last.folder,
            "after": 0 if last is None else last.step,
            "final": str(final),
            "serve_as": qualify_name(job.owner, job.name),
            "serve_checkpoints": job.plan["serve_checkpoints"],
        }
        key, _ = await self._engine.open(body, self._inbox)
        self._live[key] = JobRun(job.id, job.tenant, job.epoch, final)
        self._idle.clear()
        self._begun[job.tenant] = next(self._numbers)
        now = await asyncio.to_thread(self._records.job, job.id)
        if self._closing or now.state is not JobState.RUNNING:  # cancelled or paused while it was sent
            await self._tell_stop(key, at_once=now.state.is_end)

    def _noted_start(self, id: str) -> tuple[JobRecord, CheckpointRecord | None]:
        with self._records.transaction():
            job = self._records.change(id, StateChange.BEGIN)
            last = self._records.last_checkpoint(job)
            if last is not None and not Path(last.folder or "").is_dir():
                last = None
            self._records.forget_after(job, 0 if last is None else last.step)
            said = "Fine-tuning job started" if last is None else f"Fine-tuning job goes on after step {last.step}"
            if self._records.events(job, after=None, limit=1)[0].message != said:  # it may try again and again
                self._records.add_event(id, "message", said)
        return job, last

    def _make_place(self, job: JobRecord, last: CheckpointRecord | None) -> None:
        """For checkpoints; what earlier starts left unrecorded goes. Raises `StorageFull`."""
        kept = None if last is None else Path(last.folder or "").parent
        for each in self._folder.work(job.id).glob("try-*"):
            if each != kept:
                shutil.rmtree(each, ignore_errors=True)
        checkpoints = self._folder.checkpoints(job.id, job.epoch)
        with told():
            checkpoints.mkdir(exist_ok=True)
            to_disk(checkpoints.parent)

    # What the engine says

    async def _take(self, id: str, events: list[Said]) -> bool:
        """Record it; whether a place is free now."""
        trial = self._live.get(id)
        if trial is None:
            return False
        try:
            *before, last = events
            if (checkpoint := last_good(last)) is not None:  # it is served before anybody hears that the job failed
                job = await self._surely(lambda: asyncio.to_thread(self._notes.take, trial, before))
                trial.last = await self._serve_last(job, checkpoint)
                before = []
            job = await self._surely(lambda: asyncio.to_thread(self._notes.take, trial, [*before, last]))
        except Exception as error:  # noqa: BLE001 - this job fails with it, and no other
            _log.exception("what the engine said of %s could not be recorded", trial.job)
            await self._fail(trial.job, error)
            await self._tell_stop(id)
            job = await asyncio.to_thread(self._records.job, trial.job)
        if not any(map(is_end, events)):
            return False
        try:
            await self._put_away(job)
        finally:  # not before: until then its name is reserved
            del self._live[id]
            self._engine.forget(id)
            if not self._live:
                self._idle.set()
        if not job.state.is_end:  # unless it was ended by hand meanwhile, by who saw that it was live
            job = await asyncio.to_thread(self._records.job, trial.job)
            await self._put_away(job)
        if trial.rests:
            self._resting.add(job.id)
            asyncio.get_running_loop().call_later(_REST_S, self._rested, job.id)
        if job.state is not JobState.SUCCEEDED:
            await asyncio.to_thread(shutil.rmtree, trial.final, ignore_errors=True)
        return True

    async def _put_away(self, job: JobRecord) -> None:
        """What the end of a job leaves to do outside of the records; after a kill, it is done at the next start.

        Nothing, if it has not ended; nothing more, if this was done before.
        """
        if not job.state.is_end:
            return
        if job.state is not JobState.SUCCEEDED:
            try:
                await self._engine.ask("unload", name=qualify_name(job.owner, job.name))
            except UnknownAdapter:
                pass  # unless a checkpoint, or the end that came too late, is served
            except SymbiosisError:
                _log.exception("%s has ended, but what it served could not be put away", job.id)
        await asyncio.to_thread(self._folder.remove_work, job.id)

    def _rested(self, id: str) -> None:
        self._resting.discard(id)
        self.wake()

    async def _serve_last(self, job: JobRecord, checkpoint: str) -> LastEvent | None:
        """The last good checkpoint of a job that failed is an adapter like any other; None if it cannot be one."""
        if job.state.is_end:
            return None
        try:
            last = LastEvent(step_of(checkpoint), f"{job.name}-step-{step_of(checkpoint)}")
            folder = self._shelf.place(f"{job.id}-step-{last.step}")
            await self._surely(lambda: asyncio.to_thread(_copy, Path(checkpoint), folder))
            await self._engine.ask("load", name=qualify_name(job.owner, last.name), folder=str(folder), replace=True)
            await asyncio.to_thread(self._shelf.keep, job.owner, last.name, folder)
        except (SymbiosisError, OSError):
            _log.exception("the last good checkpoint of %s cannot be served", job.id)
            return None
        return last


_WAKE = object()


def _copy(source: Path, target: Path) -> None:
    """PEFT's two files of a checkpoint, without what only training needs, on the disk. Raises `StorageFull`."""
    shutil.rmtree(target, ignore_errors=True)
    with told():
        target.mkdir(mode=0o700)
        for file in (CONFIG, TENSORS):
            shutil.copyfile(source / file, target / file)
            to_disk(target / file)


def _told(error: Exception) -> dict[str, Any]:
    """An error as it stands in a job. What is not ours says nothing of what happened inside."""
    if isinstance(error, SymbiosisError):
        return {"code": error.code, "message": str(error), "param": getattr(error, "field", "") or None}
    _log.error("a job failed", exc_info=error)
    return {"code": "internal_error", "message": "something failed inside the server; its log says what", "param": None}
