"""Whose examples go into the next pass? A pure object: it sees who waits, and what each example costs in rows.

As in the serving engine (`engine.scheduler`): a tenant's counter grows with what was computed for it, divided by its
weight, and the least counter is served first, one example at a time. A tenant that comes back is lifted to the
least counter of those who wait, so that nobody saves up. Within a tenant, sessions take turns.

An example that does not fit leaves its tenant where it was, at the head of the next pass, which is empty then: so
everybody gets on, and nobody waits for anybody to be ready.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A session that waits."""

    session: str
    tenant: str
    weight: float
    costs: Sequence[int]
    """Of its examples in rows, in their order."""


class Fairness:
    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        """When a session was served last."""
        self._turn = 0
        self._least = 0.0
        """The least counter of those who waited last, after that pass."""

    def counter(self, tenant: str) -> float:
        """What was computed for a tenant, by weight; what it would be lifted to if it is not known."""
        return max(self._counters.get(tenant, 0.0), self._least)

    def forget(self, tenant: str, session: str) -> None:
        """A session is gone. Its tenant's counter is kept as long as it counts."""
        self._turns.pop(session, None)
        if self._counters.get(tenant, 0.0) <= self._least:
            self._counters.pop(tenant, None)

    def charge(self, tenant: str, cost: float) -> None:
        """For what was computed outside of passes, by weight."""
        self._counters[tenant] = self.counter(tenant) + cost

    def pick(self, waiting: Sequence[Candidate], max_rows: int) -> dict[str, int]:
        """How many examples of which sessions, in the order they were chosen, of at most so much; one in any case."""
        queues: dict[str, deque[tuple[Candidate, int]]] = {}
        for candidate in sorted(waiting, key=lambda c: self._turns.get(c.session, 0)):
            queues.setdefault(candidate.tenant, deque()).append((candidate, 0))
        if not queues:
            return {}
        heap = [(self.counter(tenant), tenant) for tenant in queues]
        heapq.heapify(heap)
        picked: dict[str, int] = {}
        left = max_rows
        while heap and left > 0:
            counter, tenant = heapq.heappop(heap)
            queue = queues[tenant]
            fitting = next((entry for entry in queue if entry[0].costs[entry[1]] <= left or not picked), None)
            if fitting is None:
                continue
            queue.remove(fitting)
            candidate, at = fitting
            cost = candidate.costs[at]
            left -= cost
            picked[candidate.session] = at + 1
            self._turn += 1
            self._turns[candidate.session] = self._turn
            self._counters[tenant] = counter + cost / candidate.weight
            if at + 1 < len(candidate.costs):
                queue.append((candidate, at + 1))
            if queue:
                heapq.heappush(heap, (self._counters[tenant], tenant))
        self._least = min(map(self.counter, queues))
        return picked
