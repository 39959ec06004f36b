"""Queues of instances, batches, the order of instances on a device, and moves of keys and values."""

from __future__ import annotations

import pytest

from symbiosis.cluster.policies.blocks.block_queue import BatchConfig, BlockQueue
from symbiosis.cluster.policies.blocks.kv_migration import plan_kv_move
from tests.cluster.blocks.small import make_application, make_block, make_request, make_small_cluster, settle

ONE = make_application("one", "a", has_adapter=True)
OTHER = make_application("other", "a", has_adapter=True)


def test_returning_requests_come_first_then_prompts_by_arrival():
    queue = BlockQueue(make_block(), BatchConfig())
    late, early, back = make_request(2, ONE), make_request(1, ONE), make_request(5, ONE)
    back.is_prefill = False
    for request in (late, early, back):
        queue.add(request, 0.0)
    assert queue.take().requests == [back, early, late]
    assert len(queue) == 0
    assert queue.prefill_s == 0.0


def test_a_batch_ends_where_rows_cost_more_than_the_block_itself():
    queue = BlockQueue(make_block(fixed_s=0.01), BatchConfig(stretch=4.0))
    for number in range(10):
        queue.add(make_request(number, ONE), 0.0)  # 10 ms each
    batch = queue.take()
    assert len(batch.requests) == 3
    assert batch.seconds == pytest.approx(0.04)
    assert len(queue) == 7
    assert queue.prefill_s == pytest.approx(0.07)
    light = BlockQueue(make_block(fixed_s=0.1), BatchConfig(stretch=4.0))
    for number in range(40):
        light.add(make_request(number, ONE), 0.0)
    assert len(light.take().requests) in (29, 30)  # each block has its own size
    few = BlockQueue(make_block(fixed_s=0.1), BatchConfig(stretch=4.0, max_rows=8))
    for number in range(40):
        few.add(make_request(number, ONE), 0.0)
    assert len(few.take().requests) == 8


def test_a_request_that_is_larger_than_any_batch_runs_alone():
    queue = BlockQueue(make_block(fixed_s=0.001), BatchConfig(stretch=2.0))
    queue.add(make_request(0, ONE, prompt=1000), 0.0)
    assert len(queue.take().requests) == 1


def test_each_further_adapter_in_a_batch_takes_time():
    def seconds(*applications) -> float:
        queue = BlockQueue(make_block(), BatchConfig(), adapter_share=0.5)
        for number, application in enumerate(applications):
            queue.add(make_request(number, application), 0.0)
        return queue.take().seconds

    assert seconds(ONE, OTHER) == pytest.approx(seconds(ONE, ONE) + 0.005)


def test_a_removed_request_waits_no_more():
    queue = BlockQueue(make_block(), BatchConfig())
    requests = [make_request(number, ONE) for number in range(3)]
    requests[2].is_prefill = False
    for request in requests:
        queue.add(request, 0.0)
    queue.remove(requests[0])
    queue.remove(requests[2])
    queue.remove(requests[2])
    assert requests[0] not in queue
    assert requests[1] in queue
    assert queue.take().requests == [requests[1]]


def test_a_device_ends_passes_before_it_begins_others():
    chain = make_application("two", "a", "b")
    cluster = make_small_cluster({"a": make_block(), "b": make_block()}, [chain], [("a", 0), ("b", 0)])
    device = cluster.devices[0]
    first, second = (settle(cluster, make_request(number, chain), [0, 0]) for number in (0, 1))
    device.instances["a"].queue.add(first, 0.0)
    second.position = 1
    device.instances["b"].queue.add(second, 1.0)
    assert device.next_instance(1.0) is device.instances["b"]
    device.instances["b"].ready_at = 2.0
    assert device.next_instance(1.0) is device.instances["a"]


def test_copies_and_computed_tokens_meet():
    block = make_block(prefill_s=1e-4, kv_bytes=1_000_000)  # a token takes 0.1 ms to compute and 0.1 ms to copy
    move = plan_kv_move(block, 1000, 0.0, 1e10, can_compute=True)
    assert move.computed == pytest.approx(500, abs=1)
    assert move.seconds == pytest.approx(0.05, rel=0.01)
    assert plan_kv_move(block, 1000, 0.0, 1e10, can_compute=False).seconds == pytest.approx(0.1)
    quick = plan_kv_move(make_block(prefill_s=1e-9, kv_bytes=1_000_000), 1000, 1e-3, 1e9, can_compute=True)
    assert quick.copied == 0
    assert quick.seconds < 1e-3
    long = plan_kv_move(make_block(attention_s=1e-7, kv_bytes=1_000_000), 1000, 0.0, 1e10, can_compute=True)
    assert 0 < long.computed < 500
    assert plan_kv_move(block, 1000, 0.0, 1e10, can_compute=True, can_copy=False).restarts


def test_sums_of_the_state_hold_while_requests_come_move_and_go():
    chain = make_application("two", "a", "b")
    cluster = make_small_cluster({"a": make_block(), "b": make_block()}, [chain], [("a", 0), ("b", 0), ("a", 1), ("b", 1)])
    requests = [settle(cluster, make_request(number, chain), [number % 2, 0]) for number in range(6)]
    cluster.check_integrity(requests)
    requests[0].generated = 200
    cluster.grow(requests[0], 0)
    cluster.move(requests[1], 1, cluster.devices[1].instances["b"], 3.0)
    cluster.check_integrity(requests)
    assert requests[1].devices == [1, 1]
    assert requests[1].kv_ready[1] == 3.0
    for request in requests:
        cluster.release(request)
    cluster.check_integrity()
    assert all(device.kv_bytes == 0 for device in cluster.devices)
    cluster.remove_instance(cluster.devices[0].instances["a"])
    cluster.check_integrity()
