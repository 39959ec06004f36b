"""Requests that no engine can take yet, in an order that is fair to tenants over the whole cluster.

A tenant's counter grows with the seconds of work that engines do for it, divided by its weight: virtual token counters, as in
each engine, but of all engines together. The waiting tenant with the least counter is next. A tenant that becomes active is
lifted to the least counter of the waiting tenants, so that idle time earns no credit.

A request that has waited `timely_s` has missed its objective. It comes after those that can still meet theirs, so that a
burst makes some requests late instead of all. Late requests are ordered by tenant as well. Their tenant counts as if it had
received `late_work_s` more: another tenant's flood of timely requests gains so much work, and no more. After `max_wait_s` a
late request counts as a timely one. Migrated requests precede all: a client is reading their tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping

from symbiosis.cluster.policies.cluster_state import ClusterRequest

_MAX_TENANTS = 1 << 16


class TenantQueue:
    """Waiting requests of all tenants. Each operation takes logarithmic time."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        timely_s: float = 1.5,
        max_wait_s: float = 60.0,
        late_work_s: float = 5.0,
    ) -> None:
        self.timely_s, self.max_wait_s = timely_s, max_wait_s
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._virtual_time = 0.0
        self._migrated: OrderedDict[int, ClusterRequest] = OrderedDict()
        self._overdue, self._timely, self._late = _Lanes(0.0), _Lanes(0.0), _Lanes(late_work_s)
        self._lanes = (self._overdue, self._timely, self._late)  # in the order in which a tenant's requests are taken
        self._arrivals: deque[ClusterRequest] = deque()  # of timely requests, with some that have left
        self._late_arrivals: deque[ClusterRequest] = deque()  # of late ones

    def __len__(self) -> int:
        return self._overdue.size + self._timely.size + self._late.size + len(self._migrated)

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
        if not self._is_waiting(tenant):
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._virtual_time)
        self._timely.add(request, self._counters[tenant])
        self._arrivals.append(request)

    def candidates(self, now: float, most: int) -> list[ClusterRequest]:
        """The next requests: a migrated one, `most` others of different tenants, and a late one. Take with `remove`."""
        self._expire(now)
        found = [next(iter(self._migrated.values()))] if self._migrated else []
        counters, late = self._counters, self._late
        heads = [lanes for lanes in self._lanes if lanes.find_least(counters) is not None]
        if not heads:
            return found
        self._virtual_time = max(self._virtual_time, min(lanes.heap[0][0] for lanes in heads))
        tenants: set[str] = set()
        taken: list[tuple[_Lanes, tuple[float, int, str]]] = []
        while heads and len(tenants) < most:
            lanes = heads[0] if len(heads) == 1 else min(heads, key=_key)
            entry = heapq.heappop(lanes.heap)
            taken.append((lanes, entry))
            tenant = entry[2]
            if tenant not in tenants:
                tenants.add(tenant)
                found.append(lanes.first(tenant))
            if lanes.find_least(counters) is None:
                heads.remove(lanes)
        if late in heads and all(lanes is not late for lanes, _ in taken):
            found.append(late.first(late.heap[0][2]))
        for lanes, entry in taken:
            heapq.heappush(lanes.heap, entry)
        return found

    def remove(self, request: ClusterRequest) -> None:
        """Take a request out: it was placed, or cancelled."""
        if self._migrated.pop(request.id, None) is None:
            next(lanes for lanes in self._lanes if lanes.has(request)).remove(request)

    def _is_waiting(self, tenant: str) -> bool:
        return any(tenant in lanes.by_tenant for lanes in self._lanes)

    def _expire(self, now: float) -> None:
        self._move(self._arrivals, self._timely, self._late, now - self.timely_s, self._late_arrivals)
        self._move(self._late_arrivals, self._late, self._overdue, now - self.max_wait_s)

    def _move(
        self,
        arrivals: deque[ClusterRequest],
        source: _Lanes,
        target: _Lanes,
        before: float,
        target_arrivals: deque[ClusterRequest] | None = None,
    ) -> None:
        """Requests that arrived before a time go to other lanes."""
        while arrivals and (arrivals[0].arrival <= before or not source.size):
            request = arrivals.popleft()
            if source.has(request):
                source.remove(request)
                target.add(request, self._counters[request.tenant])
                if target_arrivals is not None:
                    target_arrivals.append(request)

    def _forget(self) -> None:
        """Drop counters that the virtual time has passed."""
        kept = self._virtual_time
        self._counters = {name: value for name, value in self._counters.items() if value > kept or self._is_waiting(name)}


class _Lanes:
    """One lane for each tenant with requests of one kind, and a heap of the tenants by counter."""

    __slots__ = ("_queued", "by_tenant", "handicap", "heap", "size")

    def __init__(self, handicap: float) -> None:
        self.handicap = handicap
        """Added to counters when these lanes are compared with others."""
        self.by_tenant: dict[str, OrderedDict[int, ClusterRequest]] = {}
        self.heap: list[tuple[float, int, str]] = []
        """Counter, a request's id and the tenant. Counters may be too low, and tenants may have left: see `find_least`."""
        self._queued: set[str] = set()
        self.size = 0

    def add(self, request: ClusterRequest, counter: float) -> None:
        tenant = request.tenant
        lane = self.by_tenant.get(tenant)
        if lane is None:
            lane = self.by_tenant[tenant] = OrderedDict()
            if tenant not in self._queued:
                self._queued.add(tenant)
                heapq.heappush(self.heap, (counter, request.id, tenant))
        lane[request.id] = request
        self.size += 1

    def has(self, request: ClusterRequest) -> bool:
        return request.id in self.by_tenant.get(request.tenant, ())

    def first(self, tenant: str) -> ClusterRequest:
        return next(iter(self.by_tenant[tenant].values()))

    def remove(self, request: ClusterRequest) -> None:
        lane = self.by_tenant[request.tenant]
        del lane[request.id]
        if not lane:
            del self.by_tenant[request.tenant]
        self.size -= 1

    def find_least(self, counters: Mapping[str, float]) -> str | None:
        """The tenant with the least counter; its entry is the first of the heap then."""
        heap = self.heap
        while heap:
            counter, number, tenant = heap[0]
            current = counters.get(tenant, 0.0)
            if tenant not in self.by_tenant:
                heapq.heappop(heap)
                self._queued.discard(tenant)
            elif counter < current:  # served since
                heapq.heapreplace(heap, (current, number, tenant))
            else:
                return tenant
        return None


def _key(lanes: _Lanes) -> float:
    return lanes.heap[0][0] + lanes.handicap
