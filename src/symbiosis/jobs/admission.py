"""Admission of jobs: checks the tenant's quotas, validates small data at once, records the job."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import TooManyRequests
from symbiosis.jobs.data_preparation import INLINE_BYTES, DataPreparer
from symbiosis.jobs.database import HYPERPARAMETERS, Database, JobRecord
from symbiosis.jobs.errors import KeyReused
from symbiosis.jobs.event_recorder import FinishedAdapters
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor

_MAX_VALIDATING = 4
"""Jobs of one tenant in validation: jobs of other tenants wait behind them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """Tenant, owner and paths come from the server, never from the request's body."""

    tenant: str
    owner: str | None
    sources: dict[str, Path]
    """Uploaded files by field."""
    fields: dict[str, Any]
    """Fields that responses repeat: file ids, suffix, metadata."""
    seed: int | None
    params: Hyperparameters
    key: str | None
    """The Idempotency-Key."""
    digest: str
    """Identifies the body that the key belongs to."""


class Admission:
    """One per server."""

    def __init__(
        self,
        db: Database,
        layout: JobsLayout,
        preparer: DataPreparer,
        supervisor: Supervisor,
        store: FinishedAdapters,
        limits: JobLimits,
    ) -> None:
        self._db, self._layout, self._preparer = db, layout, preparer
        self._supervisor, self._store, self._limits = supervisor, store, limits
        self._admitting: Counter[str] = Counter()
        self._pending: dict[tuple[str, str], tuple[str, asyncio.Task[JobRecord]]] = {}  # digest and task by tenant and key

    async def find_existing(self, tenant: str, key: str, digest: str) -> JobRecord | None:
        """The job of an earlier request with this key; waits for a pending one. Raises its error, or `KeyReused`."""
        if (tenant, key) not in self._pending:
            return await asyncio.to_thread(self._db.find_job_by_key, tenant, key, digest)
        pending_digest, task = self._pending[tenant, key]
        if pending_digest != digest:
            raise KeyReused("this Idempotency-Key belongs to a different request: use a new one")
        return await asyncio.shield(task)

    async def admit(self, request: JobRequest) -> JobRecord:
        """Create a job; must not be cancelled. Raises the reason of a rejection.

        A request that is repeated while the first is pending returns the result of the first.
        """
        if request.key is None:
            return await self._admit(request)
        slot = request.tenant, request.key
        if slot not in self._pending:
            task = asyncio.create_task(self._admit(request))
            self._pending[slot] = request.digest, task
            task.add_done_callback(lambda _: self._pending.pop(slot))
        job = await self.find_existing(*slot, request.digest)
        assert job is not None, "the request is pending"
        return job

    def count_expected_adapters(self, tenant: str) -> int:
        """Adapters that jobs will add: of open jobs, paused ones included, and of those being admitted."""
        return self._db.count_open(tenant) + self._admitting[tenant]

    async def _admit(self, request: JobRequest) -> JobRecord:
        if request.key is not None:  # it may have been recorded since the caller looked
            existing = await asyncio.to_thread(self._db.find_job_by_key, request.tenant, request.key, request.digest)
            if existing is not None:
                return existing
        with self._count_admitting(request.tenant) as admitting:
            await asyncio.to_thread(self._check_quotas, request, admitting)
            job = await self._create(request)
        await asyncio.to_thread(self._prune_ended, request.tenant)
        self._supervisor.wake()
        return job

    def _prune_ended(self, tenant: str) -> None:
        limits, busy = self._limits, self._supervisor.busy_jobs()
        results = self._db.prune_ended(tenant, limits.tenant_ended, limits.tenant_ended_steps, exclude=busy)
        self._layout.remove_files(results)

    async def _create(self, request: JobRequest) -> JobRecord:
        id, name = await asyncio.to_thread(self._choose_name, request)
        seed = secrets.randbelow(1 << 31) if request.seed is None else request.seed
        asked = {**request.fields, "seed": seed, HYPERPARAMETERS: asdict(request.params)}
        try:
            size = await asyncio.to_thread(self._preparer.link_sources, id, request.sources)
            plan = await self._prepare_inline(id, request, seed) if size <= INLINE_BYTES else None
            state = JobState.VALIDATING if plan is None else JobState.QUEUED
            job = await asyncio.to_thread(
                lambda: self._db.add_job(
                    *(id, request.tenant, request.owner, name, state, asked, plan), key=request.key, digest=request.digest
                )
            )
        except BaseException:
            self._layout.remove_job(id)
            raise
        if job.id != id:  # the same request was recorded a moment before
            self._layout.remove_job(id)
        elif plan is None:
            self._supervisor.validate(job)
        else:
            self._preparer.remove_sources(id)
        return job

    def _choose_name(self, request: JobRequest) -> tuple[str, str]:
        """A job id and an adapter name that neither a stored adapter nor a job of the owner has."""
        suffix = request.fields["suffix"]
        while True:
            id = f"ftjob-{secrets.token_hex(12)}"
            name = "-".join(["ft", *([suffix] if suffix else []), id[-8:]])
            if not self._store.has(request.owner, name) and not self._db.list_jobs_named(request.owner, name):
                return id, name

    async def _prepare_inline(self, id: str, request: JobRequest, seed: int) -> dict[str, Any] | None:
        """The plan; None after a timeout."""
        try:
            plan = await self._preparer.prepare(id, request.tenant, request.params, seed, in_background=False)
        except TimeoutError:
            return None
        await asyncio.to_thread(self._supervisor.check_token_quota, request.tenant, plan.tokens)
        await self._supervisor.check_memory(plan)
        return asdict(plan)

    def _check_quotas(self, request: JobRequest, admitting: int) -> None:
        """`admitting`: the tenant's jobs being admitted, this one included."""
        counts = self._db.count_by_state(request.tenant)
        if (count := counts[JobState.VALIDATING]) >= _MAX_VALIDATING:
            raise TooManyRequests(f"{count} jobs validating, at most {_MAX_VALIDATING} allowed. Try again later", retry_s=60)
        count, most = sum(counts[state] for state in JobState if not state.is_end) + admitting, self._limits.tenant_open
        if count > most:
            raise TooManyRequests(f"{count - 1} open jobs, at most {most} allowed. Try again later", retry_s=60)
        self._store.check_count(request.owner, count)  # each open job will add an adapter
        self._store.check_bytes(request.owner)

    @contextmanager
    def _count_admitting(self, tenant: str) -> Iterator[int]:
        """Count one more job being admitted. Yields the tenant's total."""
        if self._admitting[tenant] >= _MAX_VALIDATING:
            raise TooManyRequests(f"{_MAX_VALIDATING} jobs being admitted, and no more are allowed. Try again later")
        self._admitting[tenant] += 1
        try:
            yield self._admitting[tenant]
        finally:
            self._admitting[tenant] -= 1
            self._admitting += Counter()  # drops zeros: tenants cannot grow memory
