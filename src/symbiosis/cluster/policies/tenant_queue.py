"""Requests that no engine can take yet, in an order that is fair to tenants over the whole cluster.

A tenant's counter grows with the seconds of work that engines do for it, divided by its weight: virtual token counters, as in
each engine, but of all engines together. The waiting tenant with the least counter is next. A tenant that becomes active is
lifted to the least counter of the waiting tenants, so that idle time earns no credit. A request that has waited `max_wait_s`
precedes all counters.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from symbiosis.cluster.policies.cluster_state import ClusterRequest


class TenantQueue:
    """Waiting requests of all tenants. Each operation takes logarithmic time."""

    def __init__(self, weights: Mapping[str, float] | None = None, max_wait_s: float = 10.0) -> None:
        self.max_wait_s = max_wait_s
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._lanes: dict[str, deque[ClusterRequest]] = {}
        self._heap: list[tuple[float, int, str]] = []  # of each tenant that waits; counters in it may be too low
        self._queued: set[str] = set()  # tenants with an entry in it
        self._arrivals: deque[ClusterRequest] = deque()  # all that wait, and some that have left
        self._virtual_time = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def charge(self, tenant: str, work_s: float) -> None:
        """Work of an engine for a tenant."""
        counter = max(self._counters.get(tenant, 0.0), self._virtual_time)
        self._counters[tenant] = counter + work_s / self._weights.get(tenant, 1.0)
        if len(self._counters) > 1 << 16:
            self._forget()

    def push(self, request: ClusterRequest, *, first: bool = False) -> None:
        """Queue a request; `first` in its tenant's lane for one that was placed before."""
        lane = self._lanes.get(request.tenant)
        if lane is None:
            lane = self._lanes[request.tenant] = deque()
            counter = max(self._counters.get(request.tenant, 0.0), self._virtual_time)
            self._counters[request.tenant] = counter
            if request.tenant not in self._queued:
                self._queued.add(request.tenant)
                heapq.heappush(self._heap, (counter, request.id, request.tenant))
        if first:
            lane.appendleft(request)
            self._arrivals.appendleft(request)
        else:
            lane.append(request)
            self._arrivals.append(request)
        self._length += 1

    def candidates(self, now: float, most: int) -> list[ClusterRequest]:
        """The next requests, one for each of up to `most` tenants; an overdue one first. Take with `remove`."""
        overdue = self._overdue(now)
        found = [] if overdue is None else [overdue]
        seen: list[tuple[float, int, str]] = []
        while self._heap and len(seen) < most:
            entry = heapq.heappop(self._heap)
            lane, current = self._lanes.get(entry[2]), self._counters.get(entry[2], 0.0)
            if lane is None:
                self._queued.discard(entry[2])
            elif entry[0] < current:  # served since
                heapq.heappush(self._heap, (current, entry[1], entry[2]))
            else:
                seen.append(entry)
                if lane[0] is not overdue:
                    found.append(lane[0])
        if seen:
            self._virtual_time = max(self._virtual_time, seen[0][0])
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found

    def remove(self, request: ClusterRequest) -> None:
        """Take a request out: it was placed, or cancelled."""
        lane = self._lanes[request.tenant]
        if lane[0] is request:
            lane.popleft()
        else:
            lane.remove(request)
        if not lane:
            del self._lanes[request.tenant]
        self._length -= 1
        if not self._length:
            self._arrivals.clear()

    def _overdue(self, now: float) -> ClusterRequest | None:
        arrivals = self._arrivals
        while arrivals:
            first = arrivals[0]
            if first.engine >= 0 or first.tenant not in self._lanes:
                arrivals.popleft()
                continue
            lane = self._lanes[first.tenant]
            if first.arrival + self.max_wait_s > now:
                return None
            return lane[0]
        return None

    def _forget(self) -> None:
        """Drop counters that the virtual time has passed."""
        kept = {name: counter for name, counter in self._counters.items() if counter > self._virtual_time or name in self._lanes}
        self._counters = kept
