"""Queue order: the tenant with the fewest running jobs is next, then the one with the oldest last start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """The provider's quotas."""

    running: int = 8
    tenant_running: int = 4
    tenant_open: int = 100
    """Jobs of one tenant that have not ended."""
    tenant_ended: int = 1000
    """Ended jobs of one tenant that stay in the database. Older ones are removed; their adapters stay."""
    tenant_ended_steps: int = 1_000_000
    """Total optimizer steps of those: each step has an event."""
    tenant_files: int = 1000
    file_bytes: int = 128 << 20
    tenant_bytes: int = 1 << 30
    """All files of one tenant together."""
    examples: int = 1_000_000
    tokens: int = 50_000_000
    """Tokens of one file."""
    tenant_tokens: int = 200_000_000
    """Tokens of all open jobs of one tenant: 8 bytes each on disk."""
    steps: int = 100_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1 << 40:
                raise SymbiosisError(f"jobs: {name.replace('_', ' ')} is {value!r}, expected a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    id: str
    tenant: str


def order_jobs(queued: Sequence[QueuedJob], running: Mapping[str, int], last_start: Mapping[str, int]) -> list[QueuedJob]:
    """The start order if no job ends and none is added. `queued` is oldest first.

    `last_start`: per tenant, an increasing number of its last start.
    """
    by_tenant: dict[str, deque[QueuedJob]] = {}
    for job in queued:
        by_tenant.setdefault(job.tenant, deque()).append(job)
    now = max(last_start.values(), default=0)
    heap = [(running.get(tenant, 0), last_start.get(tenant, -1), tenant) for tenant in by_tenant]
    heapify(heap)
    ordered: list[QueuedJob] = []
    while heap:
        count, _, tenant = heap[0]
        ordered.append(by_tenant[tenant].popleft())
        now += 1
        if by_tenant[tenant]:
            heapreplace(heap, (count + 1, now, tenant))
        else:
            heappop(heap)
    return ordered


def select_startable(ordered: Sequence[QueuedJob], running: Mapping[str, int], limits: JobLimits) -> list[QueuedJob]:
    """Jobs that fit the limits now."""
    counts, selected = Counter(running), list[QueuedJob]()
    for job in ordered:
        if counts.total() < limits.running and counts[job.tenant] < limits.tenant_running:
            counts[job.tenant] += 1
            selected.append(job)
    return selected


def select_preempted(
    queued: Sequence[QueuedJob], running: Mapping[str, int], preempted: Mapping[str, int], limits: JobLimits
) -> list[str]:
    """Tenants that each lose one of several running jobs, so that tenants with none can start.

    `preempted`: running jobs per tenant that are already stopping.
    """
    if sum(running.values()) < limits.running:
        return []
    needed = len({job.tenant for job in queued if not running.get(job.tenant)}) - sum(preempted.values())
    counts = Counter({tenant: count - preempted.get(tenant, 0) for tenant, count in running.items()})
    tenants: list[str] = []
    while len(tenants) < needed and counts and (most := counts.most_common(1)[0])[1] > 1:
        tenants.append(most[0])
        counts[most[0]] -= 1
    return tenants
