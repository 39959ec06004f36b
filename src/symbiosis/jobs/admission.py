"""How a job comes to be: within its tenant's limits, with its data checked if that is quick, and recorded."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import TooManyRequests
from symbiosis.jobs.data_preparation import AT_ONCE, DataPreparer
from symbiosis.jobs.database import Database, JobRecord
from symbiosis.jobs.errors import KeyReused
from symbiosis.jobs.event_recorder import AdapterShelf
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor

_READ_AT_ONCE = 4
"""Jobs of one tenant whose files are being read: everybody else's wait behind them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """A job that was asked for. Who asks, and the paths, are not the asker's own words."""

    tenant: str
    owner: str | None
    sources: dict[str, Path]
    """Its files, by field."""
    said: dict[str, Any]
    """What is shown of it again: files, suffix, metadata."""
    seed: int | None
    wishes: Hyperparameters
    key: str | None
    """Idempotency-Key, and what it stands for."""
    digest: str


class Admission:
    """One for a server. `check` is asked before a job is made, with how many of an owner's have not ended; it may refuse."""

    def __init__(
        self,
        records: Database,
        folder: JobsLayout,
        preparer: DataPreparer,
        supervisor: Supervisor,
        shelf: AdapterShelf,
        limits: JobLimits,
        check: Callable[[str | None, int], None],
    ) -> None:
        self._records, self._folder, self._preparer, self._supervisor = records, folder, preparer, supervisor
        self._shelf, self._limits, self._check = shelf, limits, check
        self._coming: Counter[str] = Counter()
        self._checking: dict[tuple[str, str], tuple[str, asyncio.Task[JobRecord]]] = {}  # by tenant and key, with its digest

    async def known(self, tenant: str, key: str, digest: str) -> JobRecord | None:
        """The job that the same request made before, once that is certain. Raises what it raised, or `KeyReused`."""
        if (tenant, key) not in self._checking:
            return await asyncio.to_thread(self._records.job_of_key, tenant, key, digest)
        checked, task = self._checking[tenant, key]
        if checked != digest:
            raise KeyReused("this Idempotency-Key stands for another request: take a new one")
        return await asyncio.shield(task)

    async def admit(self, wanted: JobRequest) -> JobRecord:
        """Once begun, let it come to its end. Raises what is wrong with it, or that there is no room.

        A request that comes again while it is checked gets the answer of the first.
        """
        if wanted.key is None:
            return await self._admit(wanted)
        place = wanted.tenant, wanted.key
        if place not in self._checking:
            task = asyncio.create_task(self._admit(wanted))
            self._checking[place] = wanted.digest, task
            task.add_done_callback(lambda _: self._checking.pop(place))
        job = await self.known(*place, wanted.digest)
        assert job is not None, "it is being checked"
        return job

    def promised(self, tenant: str) -> int:
        """Adapters to come: of jobs that have not ended, paused ones too, and of those that are being made."""
        return self._records.count_open(tenant) + self._coming[tenant]

    async def _admit(self, wanted: JobRequest) -> JobRecord:
        if wanted.key is not None:  # it may have been made since somebody looked
            known = await asyncio.to_thread(self._records.job_of_key, wanted.tenant, wanted.key, wanted.digest)
            if known is not None:
                return known
        with self._one_more(wanted.tenant) as coming:
            await asyncio.to_thread(self._check_room, wanted, coming)
            job = await self._make(wanted)
        limits, busy = self._limits, self._supervisor.busy()
        await asyncio.to_thread(
            lambda: self._records.forget_old(wanted.tenant, limits.tenant_ended, limits.tenant_ended_steps, but=busy)
        )
        self._supervisor.wake()
        return job

    async def _make(self, wanted: JobRequest) -> JobRecord:
        id, name = await asyncio.to_thread(self._named, wanted)
        seed = secrets.randbelow(1 << 31) if wanted.seed is None else wanted.seed
        asked = {**wanted.said, "seed": seed, "wishes": asdict(wanted.wishes)}
        try:
            size = await asyncio.to_thread(self._preparer.take, id, wanted.sources)
            decided = await self._decided(id, wanted, seed) if size <= AT_ONCE else None
            state = JobState.VALIDATING if decided is None else JobState.QUEUED
            job = await asyncio.to_thread(
                lambda: self._records.add_job(
                    *(id, wanted.tenant, wanted.owner, name, state, asked, decided), key=wanted.key, digest=wanted.digest
                )
            )
        except BaseException:
            self._folder.remove_work(id)
            raise
        if job.id != id:  # the same request came a moment before
            self._folder.remove_work(id)
        elif decided is None:
            self._supervisor.validate(job)
        else:
            self._preparer.release(id)
        return job

    def _named(self, wanted: JobRequest) -> tuple[str, str]:
        """An id, and with it a name that no adapter of the owner's has, nor will have by another job."""
        suffix = wanted.said["suffix"]
        while True:
            id = f"ftjob-{secrets.token_hex(12)}"
            name = "-".join(["ft", *([suffix] if suffix else []), id[-8:]])
            if not self._shelf.has(wanted.owner, name) and not self._records.jobs_named(wanted.owner, name):
                return id, name

    async def _decided(self, id: str, wanted: JobRequest, seed: int) -> dict[str, Any] | None:
        """Its plan; None if that takes long."""
        try:
            found = await self._preparer.prepare(id, wanted.tenant, wanted.wishes, seed, large=False)
        except TimeoutError:
            return None
        await asyncio.to_thread(self._supervisor.check_tokens, wanted.tenant, found.plan.tokens)
        return found.plan.to_json()

    def _check_room(self, wanted: JobRequest, coming: int) -> None:
        """`coming`: jobs that are being made, this one among them."""
        reading = self._records.count(wanted.tenant)[JobState.VALIDATING]
        if reading >= _READ_AT_ONCE:
            raise TooManyRequests(f"{reading} jobs of yours are validating_files. Try again later", retry_s=60)
        begun = self._records.count_open(wanted.tenant) + coming - 1
        if begun >= self._limits.tenant_open:
            raise TooManyRequests(f"{begun} jobs of yours have not ended, and no more may be open. Try again later", retry_s=60)
        self._check(wanted.owner, begun)

    @contextmanager
    def _one_more(self, tenant: str) -> Iterator[int]:
        """How many jobs of a tenant are being made, with this one."""
        if self._coming[tenant] >= _READ_AT_ONCE:
            raise TooManyRequests(f"{self._coming[tenant]} jobs of yours are being checked. Try again when they are")
        self._coming[tenant] += 1
        try:
            yield self._coming[tenant]
        finally:
            self._coming[tenant] -= 1
            self._coming += Counter()  # drops zeros
