"""The queue of the cluster: fair to tenants, timely requests first, none starves."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.cluster.policies.tenant_queue import TenantQueue
from tests.cluster.policies.test_cluster_state import request


def take(queue: TenantQueue, now: float = 0.0) -> str:
    first = queue.candidates(now, 4)[0]
    queue.remove(first)
    queue.charge(first.tenant, 1.0)
    return first.tenant


def test_tenants_are_served_equally_whatever_they_queue():
    queue = TenantQueue()
    for number in range(100):
        queue.push(request(number, tenant="greedy"))
    for number in range(100, 120):
        queue.push(request(number, tenant="modest"))
    assert Counter(take(queue) for _ in range(40)) == {"greedy": 20, "modest": 20}


def test_a_weight_is_a_share():
    queue = TenantQueue({"paying": 3.0})
    for number in range(200):
        queue.push(request(number, tenant="paying" if number % 2 else "free"))
    assert Counter(take(queue) for _ in range(80)) == {"paying": 60, "free": 20}


def test_idle_time_earns_no_credit():
    queue = TenantQueue()
    for number in range(50):
        queue.push(request(number, tenant="busy"))
    for _ in range(30):
        take(queue)
    for number in range(50, 100):
        queue.push(request(number, tenant="new"))
    served = Counter(take(queue) for _ in range(20))
    assert abs(served["new"] - served["busy"]) <= 2


def test_late_requests_come_after_timely_ones_but_not_for_ever():
    queue = TenantQueue(timely_s=1.5, max_wait_s=60)
    queue.push(request(0, tenant="a", arrival=0.0))
    queue.push(request(1, tenant="b", arrival=10.0))
    assert [each.id for each in queue.candidates(10.0, 4)] == [1, 0]
    queue.push(request(2, tenant="b", arrival=60.0))
    assert queue.candidates(60.0, 4)[0].id == 0


def test_a_flood_that_is_late_leaves_another_tenant_its_share():
    queue = TenantQueue(timely_s=1.5, max_wait_s=60, late_work_s=5.0)
    for number in range(1000):
        queue.push(request(number, tenant="flood", arrival=0.0))
    for number in range(1000, 1020):
        queue.push(request(number, tenant="modest", arrival=1.0))
    served = Counter(take(queue, 10.0) for _ in range(40))
    assert served == {"flood": 20, "modest": 20}
    queue.push(request(2000, tenant="modest", arrival=100.0))
    assert "modest" in {take(queue, 100.0), take(queue, 100.0)}  # although the flood has waited for more than max_wait_s


def test_a_flood_that_never_ends_is_ahead_of_late_requests_by_a_bounded_work():
    queue = TenantQueue(timely_s=1.5, max_wait_s=1000, late_work_s=5.0)
    for number in range(50):
        queue.push(request(number, tenant="modest", arrival=0.0))
    served, now = Counter(), 2.0
    for number in range(100, 200):
        queue.push(request(number, tenant="flood", arrival=now))  # always a timely one
        served[take(queue, now)] += 1
        now += 0.5
    assert 45 <= served["modest"] <= 50


def test_a_tenant_gets_its_timely_requests_before_its_late_ones():
    queue = TenantQueue(timely_s=1.5, max_wait_s=60)
    queue.push(request(0, tenant="a", arrival=0.0))
    queue.push(request(1, tenant="a", arrival=10.0))
    assert [each.id for each in queue.candidates(10.0, 4)] == [1]


def test_migrated_requests_come_first():
    queue = TenantQueue()
    queue.push(request(0))
    queue.push(request(1), migrated=True)
    assert queue.candidates(0.0, 4)[0].id == 1


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_every_request_leaves_exactly_once(seed):
    chance = random.Random(seed)
    queue, left, now = TenantQueue(timely_s=2, max_wait_s=10), [], 0.0
    waiting = {}
    for number in range(150):
        now += chance.random()
        new = request(number, tenant=f"t{chance.randrange(4)}", arrival=now)
        queue.push(new, migrated=chance.random() < 0.1)
        waiting[number] = new
        while waiting and chance.random() < 0.5:
            if chance.random() < 0.2:
                gone = waiting[chance.choice(list(waiting))]
            else:
                gone = chance.choice(queue.candidates(now, 3))
                queue.charge(gone.tenant, chance.random())
            queue.remove(gone)
            left.append(waiting.pop(gone.id).id)
        assert len(queue) == len(waiting)
    while len(queue):
        first = queue.candidates(now, 3)[0]
        queue.remove(first)
        left.append(first.id)
    assert sorted(left) == list(range(150))
