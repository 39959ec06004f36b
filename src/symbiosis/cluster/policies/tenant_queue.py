"""Requests that no engine can take yet, in an order that is fair to tenants over the whole cluster.

A tenant's counter grows with the seconds of work that engines do for it, divided by its weight: virtual token counters, as in
each engine, but of all engines together. The waiting tenant with the least counter is next. A tenant that becomes active is
lifted to the least counter of the waiting tenants, so that idle time earns no credit.

A request that has waited `timely_s` has missed its objective. It comes after those that can still meet theirs, so that a
burst makes some requests late instead of all. After `max_wait_s` it precedes them. Migrated requests precede all: a client is
reading their tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping

from symbiosis.cluster.policies.cluster_state import ClusterRequest

_MAX_TENANTS = 1 << 16


class TenantQueue:
    """Waiting requests of all tenants. Each operation takes logarithmic time."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, timely_s: float = 1.5, max_wait_s: float = 60.0) -> None:
        self.timely_s, self.max_wait_s = timely_s, max_wait_s
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._virtual_time = 0.0
        self._migrated: OrderedDict[int, ClusterRequest] = OrderedDict()
        self._lanes: dict[str, OrderedDict[int, ClusterRequest]] = {}  # by tenant: those that are timely
        self._late: OrderedDict[int, ClusterRequest] = OrderedDict()
        self._arrivals: deque[ClusterRequest] = deque()  # of all lanes, with some that have left
        self._heap: list[tuple[float, int, str]] = []  # of each tenant with a lane; counters in it may be too low
        self._queued: set[str] = set()  # tenants with an entry in it
        self._in_lanes = 0

    def __len__(self) -> int:
        return self._in_lanes + len(self._late) + len(self._migrated)

    def charge(self, tenant: str, work_s: float) -> None:
        """Work of an engine for a tenant."""
        counter = max(self._counters.get(tenant, 0.0), self._virtual_time)
        self._counters[tenant] = counter + work_s / self._weights.get(tenant, 1.0)
        if len(self._counters) > _MAX_TENANTS:
            self._forget()

    def push(self, request: ClusterRequest, *, migrated: bool = False) -> None:
        """Queue a request."""
        if migrated:
            self._migrated[request.id] = request
            return
        tenant = request.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = OrderedDict()
            self._counters[tenant] = counter = max(self._counters.get(tenant, 0.0), self._virtual_time)
            if tenant not in self._queued:
                self._queued.add(tenant)
                heapq.heappush(self._heap, (counter, request.id, tenant))
        lane[request.id] = request
        self._arrivals.append(request)
        self._in_lanes += 1

    def candidates(self, now: float, most: int) -> list[ClusterRequest]:
        """The next requests: at most `most` timely ones, each of another tenant. Take with `remove`."""
        self._expire(now)
        found: list[ClusterRequest] = []
        if self._migrated:
            found.append(next(iter(self._migrated.values())))
        late = next(iter(self._late.values())) if self._late else None
        if late is not None and late.arrival + self.max_wait_s <= now:
            found.append(late)
            late = None
        seen: list[tuple[float, int, str]] = []
        heap, lanes, counters = self._heap, self._lanes, self._counters
        while heap and len(seen) < most:
            counter, number, tenant = heap[0]
            lane, current = lanes.get(tenant), counters.get(tenant, 0.0)
            if lane is None:
                heapq.heappop(heap)
                self._queued.discard(tenant)
            elif counter < current:  # served since
                heapq.heapreplace(heap, (current, number, tenant))
            else:
                seen.append(heapq.heappop(heap))
                found.append(next(iter(lane.values())))
        if seen:
            self._virtual_time = max(self._virtual_time, seen[0][0])
        for entry in seen:
            heapq.heappush(heap, entry)
        if late is not None:
            found.append(late)
        return found

    def remove(self, request: ClusterRequest) -> None:
        """Take a request out: it was placed, or cancelled."""
        if self._late.pop(request.id, None) is None and self._migrated.pop(request.id, None) is None:
            self._take_from_lane(request)

    def _take_from_lane(self, request: ClusterRequest) -> None:
        lane = self._lanes[request.tenant]
        del lane[request.id]
        if not lane:
            del self._lanes[request.tenant]
        self._in_lanes -= 1

    def _expire(self, now: float) -> None:
        arrivals, before = self._arrivals, now - self.timely_s
        while arrivals and (arrivals[0].arrival <= before or not self._in_lanes):
            request = arrivals.popleft()
            if request.id in self._lanes.get(request.tenant, ()):
                self._take_from_lane(request)
                self._late[request.id] = request

    def _forget(self) -> None:
        """Drop counters that the virtual time has passed."""
        kept = self._virtual_time
        self._counters = {name: value for name, value in self._counters.items() if value > kept or name in self._lanes}
