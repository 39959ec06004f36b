"""Fair choice of the next pass's examples among tenants, by virtual time.

As in the serving scheduler: a tenant's virtual time grows with the rows computed for it, divided by its weight. The tenant
with the least virtual time is served first, one example at a time. A tenant that returns is raised to the least virtual
time of the candidates, so idle time gains no credit. Within a tenant, the least recently served session goes first.

A tenant whose example does not fit is not charged. It is served first in the next pass, so no example starves.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A session with pending examples."""

    session: str
    tenant: str
    weight: float
    costs: Sequence[int]
    """Rows of its examples, in their order."""


class Fairness:
    def __init__(self) -> None:
        self._virtual_times: dict[str, float] = {}
        self._last_served: dict[str, int] = {}  # by session, in examples of all tenants
        self._served = 0
        self._least = 0.0  # virtual time of the candidates after the last pass

    def virtual_time(self, tenant: str) -> float:
        return max(self._virtual_times.get(tenant, 0.0), self._least)

    def remove_session(self, tenant: str, session: str) -> None:
        """The tenant's virtual time is kept while it is above the least."""
        self._last_served.pop(session, None)
        if self._virtual_times.get(tenant, 0.0) <= self._least:
            self._virtual_times.pop(tenant, None)

    def charge(self, tenant: str, cost: float) -> None:
        """Add work outside of passes, divided by weight."""
        self._virtual_times[tenant] = self.virtual_time(tenant) + cost

    def pick(self, candidates: Sequence[Candidate], max_rows: int) -> dict[str, int]:
        """The number of examples by session, in the order they were chosen: of `max_rows` at most, or one longer example."""
        queues: dict[str, deque[tuple[Candidate, int]]] = {}
        for candidate in sorted(candidates, key=lambda each: self._last_served.get(each.session, 0)):
            queues.setdefault(candidate.tenant, deque()).append((candidate, 0))
        if not queues:
            return {}
        heap = [(self.virtual_time(tenant), tenant) for tenant in queues]
        heapq.heapify(heap)
        picked: dict[str, int] = {}
        free_rows = max_rows
        while heap and free_rows > 0:
            virtual_time, tenant = heapq.heappop(heap)
            queue = queues[tenant]
            fitting = next((entry for entry in queue if entry[0].costs[entry[1]] <= free_rows or not picked), None)
            if fitting is None:
                continue
            queue.remove(fitting)
            candidate, at = fitting
            cost = candidate.costs[at]
            free_rows -= cost
            picked[candidate.session] = at + 1
            self._served += 1
            self._last_served[candidate.session] = self._served
            self._virtual_times[tenant] = virtual_time + cost / candidate.weight
            if at + 1 < len(candidate.costs):
                queue.append((candidate, at + 1))
            if queue:
                heapq.heappush(heap, (self._virtual_times[tenant], tenant))
        self._least = min(map(self.virtual_time, queues))
        return picked
