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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from symbiosis.engine.names import owned, owner_and_name
from symbiosis.errors import EngineLost, SymbiosisError, UnknownAdapter
from symbiosis.jobs.errors import StorageFull, WrongState
from symbiosis.jobs.folder import Folder
from symbiosis.jobs.plan import Wishes
from symbiosis.jobs.preparing import Preparer
from symbiosis.jobs.queue import JobLimits, order, startable
from symbiosis.jobs.records import Checkpoint, Job, Records
from symbiosis.jobs.states import Change, State

_RETRY_S = 1.0
_REST_S = 5.0
"""A job that the engine had no room for tries again after so long."""
_STOP_S = 15.0
_BATCH = 2000
_NOBODY = "everybody"
"""Where there are no keys, all who ask are one tenant without a name."""
_FULL = ("too_many_requests", "closed", "engine_lost")
_log = logging.getLogger("symbiosis")


class Engine(Protocol):
    """The engine's process, as `server.remote` reaches it."""

    async def open(self, body: dict[str, Any], inbox: asyncio.Queue[Any] | None = None) -> tuple[str, asyncio.Queue[Any]]: ...

    def forget(self, id: str) -> None: ...

    async def stop_training(self, id: str) -> None: ...

    async def ask(self, op: str, **body: Any) -> dict[str, Any]: ...


class Shelf(Protocol):
    """Where finished adapters are kept."""

    def place(self, tag: str) -> Path:
        """A folder that is not there yet."""
        ...

    def keep(self, owner: str | None, name: str, folder: Path) -> None:
        """It stays, under this name, and the next server has it too."""
        ...


@dataclass(slots=True)
class Try:
    """A job at the engine."""

    job: str
    tenant: str
    epoch: int
    final: Path
    clock: float = 0.0
    """When its first step was done."""
    steps: int = 0
    """Since then."""


class Supervisor:
    """One for a server. `count` hears of steps: a tenant, how many, and their tokens."""

    def __init__(
        self,
        records: Records,
        folder: Folder,
        engine: Engine,
        shelf: Shelf,
        preparer: Preparer,
        limits: JobLimits,
        count: Callable[[str, int, int], None] = lambda tenant, steps, tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._folder, self._engine, self._shelf = records, folder, engine, shelf
        self._preparer, self._limits, self._count, self._clock = preparer, limits, count, clock
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._live: dict[str, Try] = {}
        self._begun: dict[str, int] = {}  # when a tenant's last job was started
        self._numbers = itertools.count(1)
        self._resting: set[str] = set()
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

    def validate(self, job: Job) -> None:
        """Read a job's data beside everything else; then it is queued, or has failed."""
        task = asyncio.create_task(self._validate(job))
        self._validating[job.id] = task
        task.add_done_callback(lambda _: self._validating.pop(job.id, None))

    async def cancel(self, id: str) -> Job:
        """Raises `WrongState`."""
        return await self._end_by_hand(id, Change.CANCEL, "The job was cancelled")

    async def pause(self, id: str) -> Job:
        """Raises `WrongState`."""
        return await self._end_by_hand(id, Change.PAUSE, "The job was paused")

    async def resume(self, id: str) -> Job:
        """Raises `WrongState`."""
        job = await asyncio.to_thread(self._change, id, Change.RESUME, "The job was resumed: it is queued")
        self.wake()
        return job

    def positions(self) -> dict[str, int]:
        """Of queued jobs, from 1 on."""
        ordered = order(self._records.waiting(), self._running(), self._begun)
        return {each.id: place for place, each in enumerate(ordered, 1)}

    def _running(self) -> Counter[str]:
        return Counter(each.tenant for each in self._live.values())

    # Data

    async def _validate(self, job: Job) -> None:
        wishes = Wishes(**job.asked["wishes"])
        try:
            while True:
                try:
                    found = await self._preparer.prepare(job.id, wishes, job.asked["seed"], large=True)
                    await asyncio.to_thread(self._validated, job, found.plan.to_json())
                    break
                except StorageFull as error:
                    _log.warning("%s waits: %s", job.id, error)
                    await asyncio.sleep(_RETRY_S)
            self._preparer.release(job.id)
        except WrongState:
            if self._records.job(job.id).state.is_end:  # cancelled meanwhile
                self._folder.remove_work(job.id)
        except Exception as error:  # noqa: BLE001 - the job ends with it, whatever it is
            await asyncio.to_thread(self._fail, job.id, _told(error))
            self._folder.remove_work(job.id)
        self.wake()

    def _validated(self, job: Job, plan: dict[str, Any]) -> None:
        with self._records.transaction():
            self._records.change(job.id, Change.VALIDATE, plan=plan, steps=plan["steps"])
            self._records.add_event(job.id, "message", "Files validated, moving job to queued state")

    # States

    def _change(self, id: str, change: Change, message: str) -> Job:
        with self._records.transaction():
            job = self._records.change(id, change)
            self._records.add_event(id, "message", message)
            return job

    async def _end_by_hand(self, id: str, change: Change, message: str) -> Job:
        job = await asyncio.to_thread(self._change, id, change, message)
        live = [key for key, each in self._live.items() if each.job == id]
        for key in live:
            await self._tell_stop(key)
        if not live and job.state.is_end and id not in self._validating:
            self._folder.remove_work(id)
        self.wake()
        return job

    def _fail(self, id: str, error: dict[str, Any]) -> None:
        with suppress(WrongState), self._records.transaction():
            self._records.change(id, Change.FAIL, error=error)
            self._records.add_event(id, "message", error["message"], level="error", data={"code": error["code"]})

    async def _tell_stop(self, key: str) -> None:
        with suppress(EngineLost):
            await self._engine.stop_training(key)

    # Starting

    def _take_up(self) -> list[Job]:
        """What an earlier process left. Returns the jobs whose data is to be read."""
        for job in self._records.jobs_in(State.RUNNING):
            with self._records.transaction():
                self._records.change(job.id, Change.INTERRUPT)
                self._records.add_event(job.id, "message", "The server was restarted: the job is queued again", level="warn")
        unfinished = self._records.jobs_in(State.VALIDATING, State.QUEUED, State.PAUSED)
        self._folder.remove_others(files=self._records.file_ids(), jobs={job.id for job in unfinished})
        return [job for job in unfinished if job.state is State.VALIDATING]

    async def _run(self) -> None:
        while True:
            batch = [await self._inbox.get()]
            while not self._inbox.empty() and len(batch) < _BATCH:
                batch.append(self._inbox.get_nowait())
            by_try: dict[str, list[dict[str, Any]]] = {}
            for event in batch:
                if isinstance(event, dict):
                    by_try.setdefault(event["id"], []).append(event)
            looks = any(event is _WAKE for event in batch)
            for id, events in by_try.items():
                looks |= await self._take(id, events)
            if any(event is None for event in batch):
                self._idle.set()
                for task in self._validating.values():
                    task.cancel()
                return  # the engine is lost, and so is this process
            if looks and not self._closing:
                await self._start_some()

    async def _start_some(self) -> None:
        live = {each.job for each in self._live.values()} | self._resting
        waiting = [each for each in await asyncio.to_thread(self._records.waiting) if each.id not in live]
        running = self._running()
        for each in startable(order(waiting, running, self._begun), running, self._limits):
            try:
                await self._begin(each.id)
            except WrongState:
                continue
            except StorageFull as error:
                _log.warning("no job can be started: %s", error)
                asyncio.get_running_loop().call_later(_RETRY_S, self.wake)
                return
            except EngineLost:
                return

    async def _begin(self, id: str) -> None:
        job, last = await asyncio.to_thread(self._noted_start, id)
        assert job.plan is not None
        final = self._shelf.place(f"{job.id}-{job.epoch}")
        validation = self._folder.data(id, "validation_file")
        body = {
            "op": "train",
            "tenant": job.tenant or _NOBODY,
            "adapter": job.plan["adapter"],
            "recipe": job.plan["recipe"],
            "seed": job.plan["recipe"]["seed"],
            "weight": 1.0,
            "data": str(self._folder.data(id, "training_file")),
            "validation": str(validation) if validation.exists() else None,
            "evaluate_every": job.plan["evaluate_every"],
            "checkpoints": str(self._folder.checkpoints(id, job.epoch)),
            "checkpoint_every": job.plan["checkpoint_every"],
            "resume": None if last is None else last.folder,
            "after": 0 if last is None else last.step,
            "final": str(final),
            "serve_as": owned(job.owner, job.name),
            "serve_checkpoints": job.plan["serve_checkpoints"],
        }
        key, _ = await self._engine.open(body, self._inbox)
        self._live[key] = Try(id, job.tenant, job.epoch, final)
        self._idle.clear()
        self._begun[job.tenant] = next(self._numbers)
        if self._records.job(id).state is not State.RUNNING:  # cancelled or paused while it was sent
            await self._tell_stop(key)

    def _noted_start(self, id: str) -> tuple[Job, Checkpoint | None]:
        with self._records.transaction():
            job = self._records.change(id, Change.BEGIN)
            last = self._records.last_checkpoint(job)
            if last is not None and not Path(last.folder or "").is_dir():
                last = None
            self._records.forget_after(job, 0 if last is None else last.step)
            said = "Fine-tuning job started" if last is None else f"Fine-tuning job goes on after step {last.step}"
            self._records.add_event(id, "message", said)
        checkpoints = self._folder.checkpoints(id, job.epoch)
        checkpoints.mkdir(parents=True, exist_ok=True)
        return job, last

    # What the engine says

    async def _take(self, id: str, events: list[dict[str, Any]]) -> bool:
        """Record it; whether a place is free now."""
        trial = self._live.get(id)
        if trial is None:
            return False
        while True:
            try:
                job, end = await asyncio.to_thread(self._record, trial, events)
                break
            except StorageFull as error:
                _log.warning("what %s says waits: %s", trial.job, error)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - this job fails with it, and no other
                _log.exception("what the engine said of %s could not be recorded", trial.job)
                await asyncio.to_thread(self._fail, trial.job, _told(error))
                await self._tell_stop(id)
                job, end = self._records.job(trial.job), next((each for each in map(_end, events) if each), None)
                break
        if end is None:
            return False
        del self._live[id]
        self._engine.forget(id)
        if not self._live:
            self._idle.set()
        try:
            await self._after(job, trial)
        except (SymbiosisError, OSError):
            _log.exception("%s has ended, but something of it could not be put away", job.id)
        return True

    def _record(self, trial: Try, events: list[dict[str, Any]]) -> tuple[Job, dict[str, Any] | None]:
        end = None
        with self._records.transaction():
            for event in events:
                self._note(self._records.job(trial.job), trial, event)
                end = _end(event) or end
        steps = [event["training"]["step"] for event in events if "step" in event.get("training", ())]
        if steps:
            self._count(trial.tenant, len(steps), sum(step["tokens"] for step in steps))
        return self._records.job(trial.job), end

    def _note(self, job: Job, trial: Try, event: dict[str, Any]) -> None:
        if "refused" in event:
            self._note_failure(job, event["refused"])
            return
        kind, body = next(iter(event["training"].items()))
        if job.state.is_end:
            return
        if kind == "begun":
            self._records.set(job.id, steps=body["steps"])
        elif kind == "step":
            self._note_step(job, trial, body)
        elif kind == "validation":
            said = f"Step {body['step']}/{job.steps}: validation loss={body['loss']:.4f}"
            data = {"step": body["step"], "total_steps": job.steps, "valid_loss": body["loss"]}
            self._records.add_event(job.id, "metrics", said, step=body["step"], data=data)
            self._records.set(job.id, figures={**job.figures, "valid_loss": body["loss"]})
        elif kind == "checkpoint":
            self._note_checkpoint(job, body["step"], body["folder"], body["hash"], body["serves"])
        elif kind == "stopped":
            if body["folder"] is not None:
                self._note_checkpoint(job, body["step"], body["folder"], None, None)
            if job.state is State.RUNNING:
                self._records.change(job.id, Change.INTERRUPT, epoch=trial.epoch)
        elif kind == "failed":
            if body["checkpoint"] is not None:
                self._note_checkpoint(job, _step_of(body["checkpoint"]), body["checkpoint"], None, None)
            self._note_failure(job, body)
        elif kind == "trained":
            self._shelf.keep(job.owner, job.name, Path(body["folder"]))
            self._records.change(job.id, Change.SUCCEED, epoch=trial.epoch, hash=body["hash"], step=body["step"])
            self._records.add_event(job.id, "message", f"New fine-tuned model created: {job.name}")
            self._records.add_event(job.id, "message", "The job has successfully completed")

    def _note_step(self, job: Job, trial: Try, body: dict[str, Any]) -> None:
        now = self._clock()
        if not trial.steps:
            trial.clock = now
        trial.steps += 1
        each_s = (now - trial.clock) / max(1, trial.steps - 1)
        figures = {
            "train_loss": body["loss"],
            "learning_rate": body["learning_rate"],
            "gradient_norm": body["gradient_norm"],
            "tokens_per_s": body["tokens_per_s"],
            "finish_at": int(now + each_s * (body["total"] - body["step"])) if trial.steps > 1 else None,
        }
        data = {"step": body["step"], "total_steps": body["total"], "tokens": body["tokens"], **figures}
        del data["finish_at"]
        said = f"Step {body['step']}/{body['total']}: training loss={body['loss']:.4f}"
        self._records.add_event(job.id, "metrics", said, step=body["step"], data=data)
        self._records.set(
            job.id,
            step=body["step"],
            steps=body["total"],
            tokens=job.tokens + body["tokens"],
            figures={**job.figures, **figures},
        )

    def _note_checkpoint(self, job: Job, step: int, folder: str, hash: str | None, serves: str | None) -> None:
        metrics: dict[str, Any] = {"step": step}
        metrics |= {key: job.figures[key] for key in ("train_loss", "valid_loss") if key in job.figures}
        name = None if serves is None else owner_and_name(serves)[1]
        self._records.add_checkpoint(job, step, folder, hash, name, metrics)
        self._records.add_event(job.id, "message", f"Checkpoint created at step {step}", step=step, data={"step": step})
        for old in self._records.drop_folders(job, before=step):
            shutil.rmtree(old, ignore_errors=True)

    def _note_failure(self, job: Job, body: dict[str, Any]) -> None:
        if body["code"] in _FULL and job.state is State.RUNNING:
            self._records.change(job.id, Change.INTERRUPT)
            self._resting.add(job.id)
        elif not job.state.is_end and not (job.state is State.PAUSED and body["code"] in _FULL):
            error = {"code": body["code"], "message": body["message"], "param": body.get("field") or None}
            self._records.change(job.id, Change.FAIL, error=error)
            self._records.add_event(job.id, "message", body["message"], level="error", data={"code": body["code"]})

    async def _after(self, job: Job, trial: Try) -> None:
        """What an end leaves to do outside of the records."""
        if job.id in self._resting:
            asyncio.get_running_loop().call_later(_REST_S, self._rested, job.id)
        if job.state in (State.CANCELLED, State.FAILED):
            with suppress(UnknownAdapter):  # unless a checkpoint, or the end that came too late, is served
                await self._engine.ask("unload", name=owned(job.owner, job.name))
        if job.state is State.FAILED and (last := self._records.last_checkpoint(job)) is not None:
            await self._serve_last(job, last)
        if job.state is not State.SUCCEEDED:
            shutil.rmtree(trial.final, ignore_errors=True)
        if job.state.is_end:
            await asyncio.to_thread(self._folder.remove_work, job.id)

    def _rested(self, id: str) -> None:
        self._resting.discard(id)
        self.wake()

    async def _serve_last(self, job: Job, last: Checkpoint) -> None:
        """The last good checkpoint of a job that failed is an adapter like any other."""
        name = f"{job.name}-step-{last.step}"
        folder = self._shelf.place(f"{job.id}-step-{last.step}")
        await asyncio.to_thread(_copy, Path(last.folder or ""), folder)
        await self._engine.ask("load", name=owned(job.owner, name), folder=str(folder), replace=True)
        await asyncio.to_thread(self._shelf.keep, job.owner, name, folder)
        await asyncio.to_thread(self._noted_last, job, last.step, name)

    def _noted_last(self, job: Job, step: int, name: str) -> None:
        with self._records.transaction():
            self._records.set_served(job, step, name)
            self._records.add_event(job.id, "message", f"The last good checkpoint, of step {step}, is served as {name}")


_WAKE = object()
_ENDS = ("trained", "stopped", "failed")


def _end(event: dict[str, Any]) -> dict[str, Any] | None:
    if "refused" in event:
        return event
    said: dict[str, Any] = event["training"]
    return said if any(kind in said for kind in _ENDS) else None


def _step_of(folder: str) -> int:
    found = re.fullmatch(r"step-(\d+)", Path(folder).name)
    if found is None:
        raise SymbiosisError("the engine names a checkpoint that is none")
    return int(found[1])


def _copy(source: Path, target: Path) -> None:
    """PEFT's two files of a checkpoint, without what only training needs."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("training_state*"))


def _told(error: Exception) -> dict[str, Any]:
    """An error as it stands in a job. What is not ours says nothing of what happened inside."""
    if isinstance(error, SymbiosisError):
        return {"code": error.code, "message": str(error), "param": getattr(error, "field", "") or None}
    _log.error("a job failed", exc_info=error)
    return {"code": "internal_error", "message": "something failed inside the server; its log says what", "param": None}
