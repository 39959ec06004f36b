"""Whose job is next: the tenant's that has fewest running, then the one's who has waited longest for a start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """What the provider allows."""

    running: int = 8
    tenant_running: int = 4
    tenant_open: int = 100
    """Jobs of one tenant that have not ended."""
    tenant_ended: int = 1000
    """Jobs of one tenant that have ended and are remembered; older ones are forgotten, their adapters stay."""
    tenant_ended_steps: int = 1_000_000
    """The steps of those together: each has an event."""
    tenant_files: int = 1000
    file_bytes: int = 128 << 20
    tenant_bytes: int = 1 << 30
    """All files of one tenant together."""
    examples: int = 1_000_000
    tokens: int = 50_000_000
    """Of one file."""
    tenant_tokens: int = 200_000_000
    """Of the data of all jobs of one tenant that have not ended: 8 bytes each on the disk."""
    steps: int = 100_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1 << 40:
                raise SymbiosisError(f"jobs: {name.replace('_', ' ')} is {value!r}, expected a whole number from 1 on")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    id: str
    tenant: str


def order(waiting: Sequence[QueuedJob], running: Mapping[str, int], last: Mapping[str, int]) -> list[QueuedJob]:
    """The order in which jobs would start if none ended and none came. `waiting` is oldest first.

    `last`: when a tenant's last job was started, by any growing number.
    """
    left: dict[str, deque[QueuedJob]] = {}
    for each in waiting:
        left.setdefault(each.tenant, deque()).append(each)
    now = max(last.values(), default=0)
    heap = [(running.get(tenant, 0), last.get(tenant, -1), tenant) for tenant in left]
    heapify(heap)
    found: list[QueuedJob] = []
    while heap:
        count, _, tenant = heap[0]
        found.append(left[tenant].popleft())
        now += 1
        if left[tenant]:
            heapreplace(heap, (count + 1, now, tenant))
        else:
            heappop(heap)
    return found


def startable(ordered: Sequence[QueuedJob], running: Mapping[str, int], limits: JobLimits) -> list[QueuedJob]:
    """Those that may start now."""
    counts, found = Counter(running), list[QueuedJob]()
    for each in ordered:
        if counts.total() < limits.running and counts[each.tenant] < limits.tenant_running:
            counts[each.tenant] += 1
            found.append(each)
    return found


def crowded(
    waiting: Sequence[QueuedJob], running: Mapping[str, int], leaving: Mapping[str, int], limits: JobLimits
) -> list[str]:
    """Tenants that are to give up a place each, of several they have, for those who wait and have none.

    `leaving`: how many of their running jobs were told to go already.
    """
    if sum(running.values()) < limits.running:
        return []
    hungry = len({each.tenant for each in waiting if not running.get(each.tenant)}) - sum(leaving.values())
    counts = Counter({tenant: count - leaving.get(tenant, 0) for tenant, count in running.items()})
    found: list[str] = []
    while len(found) < hungry and counts and (most := counts.most_common(1)[0])[1] > 1:
        found.append(most[0])
        counts[most[0]] -= 1
    return found
