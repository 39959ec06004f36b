"""Dispatch of requests to block instances: small cases whose answer is plain."""

from __future__ import annotations

import pytest

from symbiosis.cluster.policies.blocks.catalog import MeasuredChain
from symbiosis.cluster.policies.blocks.dispatch import BlockDispatcher, DispatchConfig, KvRule
from tests.cluster.blocks.small import GB, make_application, make_block, make_request, make_small_cluster, settle

ONE = make_application("one", "a")
TWO = make_application("two", "a", "b")


def dispatcher(cluster, **changes) -> BlockDispatcher:
    return BlockDispatcher(cluster, DispatchConfig(**changes))


def test_a_new_request_goes_to_the_instance_with_the_shortest_queue():
    cluster = make_small_cluster({"a": make_block()}, [ONE], [("a", 0), ("a", 1)])
    for number in range(3):
        settle(cluster, make_request(number, ONE), [0])
    hop = dispatcher(cluster).next_hop(make_request(9, ONE), None, 0.0)
    assert (hop.device, hop.instance) == (1, cluster.devices[1].instances["a"])


def test_latency_is_the_sum_of_queue_compute_transfer_and_load():
    block = make_block(row_bytes=12_500_000)
    cluster = make_small_cluster({"a": block, "b": block}, [TWO], [("a", 0), ("b", 2)], load_bytes_s=1e8)
    cluster.devices[2].instances["b"].ready_at = 0.5
    cluster.devices[2].busy_until = 0.25
    request = make_request(0, TWO)
    cluster.assign(request, cluster.devices[0].instances["a"])
    request.position = 1
    hop = dispatcher(cluster).next_hop(request, 0, 0.0)
    transfer_s = 50e-6 + 100 * 12_500_000 / 12.5e9
    compute_s = 0.01 + 100 * 1e-4
    assert hop.transfer_s == pytest.approx(transfer_s)
    assert hop.latency_s == pytest.approx(0.25 + compute_s + transfer_s + (0.5 - transfer_s))


def test_the_owner_of_the_keys_and_values_comes_first_though_another_is_idle():
    cluster = make_small_cluster({"a": make_block()}, [ONE], [("a", 0), ("a", 1)])
    cluster.devices[0].busy_until = 5.0
    request = settle(cluster, make_request(0, ONE), [0])
    assert dispatcher(cluster).next_hop(request, 0, 0.0).device == 0
    least = dispatcher(cluster, kv_rule=KvRule.LEAST_BUSY).next_hop(request, 0, 0.0)
    assert least.device == 1
    assert least.move.computed + least.move.copied == request.tokens


def test_an_owner_without_memory_gives_the_request_away():
    cluster = make_small_cluster({"a": make_block()}, [ONE], [("a", 0), ("a", 1)], memory=1.001)
    request = settle(cluster, make_request(0, ONE), [0])
    request.generated = 40  # needs a further page
    cluster.devices[0].kv_bytes = cluster.devices[0].memory_bytes - cluster.devices[0].weight_bytes
    hop = dispatcher(cluster).next_hop(request, 0, 0.0)
    assert hop.device == 1
    assert hop.move is not None
    again = dispatcher(cluster, kv_rule=KvRule.RECOMPUTE).next_hop(request, 0, 0.0)
    assert again.move.restarts
    assert again.move.copied == 0


def test_a_block_without_an_instance_is_loaded_where_idle_ones_make_room():
    blocks = {"a": make_block(gigabytes=6), "b": make_block(gigabytes=6)}
    cluster = make_small_cluster(blocks, [TWO, ONE], [("a", 0), ("a", 1)], servers=(2,))
    settle(cluster, make_request(0, ONE), [0])
    request = make_request(1, TWO)
    cluster.assign(request, cluster.devices[0].instances["a"])
    request.position = 1
    hop = dispatcher(cluster).next_hop(request, 0, 0.0)
    assert (hop.device, hop.instance, [each.block for each in hop.evicted]) == (1, None, ["a"])
    assert hop.load_s == pytest.approx(6 * GB / 2e12 + 6 * GB / 12.5e9)


def test_equal_instances_are_taken_on_the_same_device_then_on_the_same_server():
    blocks = {"a": make_block(), "b": make_block()}
    cluster = make_small_cluster(blocks, [TWO], [("a", 1), ("b", 0), ("b", 3)])
    request = make_request(0, TWO)
    cluster.assign(request, cluster.devices[1].instances["a"])
    request.position = 1
    assert dispatcher(cluster).next_hop(request, 1, 0.0).device == 0
    cluster.add_instance("b", 1, 0.0)
    assert dispatcher(cluster).next_hop(request, 1, 0.0).device == 1


def test_the_first_block_is_taken_where_the_rest_of_the_chain_is():
    blocks = {"a": make_block(), "b": make_block()}
    cluster = make_small_cluster(blocks, [TWO], [("a", 0), ("a", 2), ("b", 2)])
    cluster.devices[2].busy_until = 0.004
    assert dispatcher(cluster).next_hop(make_request(0, TWO), None, 0.0).device == 2


LESS = MeasuredChain(("s",), 0.2)


@pytest.mark.parametrize(
    ("max_loss", "busy_s", "expected"),
    [(0.3, 0.0, "a"), (0.3, 1.0, "s"), (0.1, 1.0, "a"), (0.0, 1.0, "a")],
    ids=["not behind", "behind", "behind, but it would lose more than the tenant allows", "behind, own chain only"],
)
def test_an_equivalent_block_serves_where_the_own_one_is_behind_and_the_tenant_allows_it(max_loss, busy_s, expected):
    application = make_application("one", "a", others=(LESS,), max_loss=max_loss)
    cluster = make_small_cluster({"a": make_block(), "s": make_block()}, [application], [("a", 0), ("s", 1)])
    cluster.devices[0].busy_until = busy_s
    request = make_request(0, application)
    assert dispatcher(cluster).next_hop(request, None, 0.0).block == expected
    assert dispatcher(cluster, is_adaptive=False).next_hop(request, None, 0.0).block == "a"


def test_a_request_stays_in_the_chain_that_it_began():
    stitched = MeasuredChain(("s", "b"), 0.1)
    application = make_application("one", "a", "b", others=(stitched, MeasuredChain(("s", "t"), 0.3)), max_loss=0.2)
    blocks = {name: make_block() for name in ("a", "b", "s", "t")}
    cluster = make_small_cluster(blocks, [application], [("a", 0), ("s", 1), ("b", 2), ("t", 3)])
    request = make_request(0, application)
    assert stitched in request.chains
    assert len(request.chains) == 2
    cluster.devices[0].busy_until = 1.0
    hop = dispatcher(cluster).next_hop(request, None, 0.0)
    assert hop.block == "s"
    request.chains = (stitched,)
    cluster.assign(request, hop.instance)
    request.position = 1
    assert dispatcher(cluster).next_hop(request, 1, 0.0).block == "b"


def test_the_youngest_request_gives_way_and_never_an_older_one():
    cluster = make_small_cluster({"a": make_block()}, [ONE], [("a", 0)])
    old, young = (settle(cluster, make_request(number, ONE), [0]) for number in (1, 2))
    assert dispatcher(cluster).victim(0, old) is young
    assert dispatcher(cluster).victim(0, young) is None
