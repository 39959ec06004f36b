"""Placement by locality and by fragments, and scaling of single blocks."""

from __future__ import annotations

import pytest

from symbiosis.cluster.policies.blocks.block_placement import (
    PlacementRule,
    TrafficCounter,
    place_by_fragments,
    place_by_locality,
)
from symbiosis.cluster.policies.blocks.block_queue import BatchConfig
from symbiosis.cluster.policies.blocks.block_scaling import (
    BlockScalingConfig,
    ScaleOut,
    choose_scale_outs,
    queue_share,
    requests_to_move,
)
from symbiosis.cluster.policies.blocks.block_state import BlockCluster
from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.errors import DoesNotFit
from tests.cluster.blocks.small import GB, make_application, make_block, make_request, make_small_cluster, settle


def place(catalog, rule=PlacementRule.LOCALITY, servers=(2, 2), memory=10.0):
    topology = BlockTopology(servers=servers, memory_bytes=round(memory * GB))
    found = place_by_locality(catalog, topology, TrafficCounter.expected(catalog), prompt=100, output=10)
    return place_by_fragments(found, catalog, topology) if rule is PlacementRule.FRAGMENTATION else found


def devices_of(placed, block):
    return {each.device for each in placed if each.block == block}


def test_a_chain_is_on_one_device():
    names = ("a", "b", "c")
    catalog = BlockCatalog(
        {f"{chain}{name}": make_block(gigabytes=1 + index) for chain in names for index, name in enumerate(names)},
        [make_application(chain, *(f"{chain}{name}" for name in names)) for chain in names],
    )
    placed = place(catalog)
    for chain in names:
        assert devices_of(placed, f"{chain}a") == devices_of(placed, f"{chain}b") == devices_of(placed, f"{chain}c")


def test_a_chain_joins_the_blocks_that_it_shares():
    blocks = {name: make_block() for name in ("head", "middle", "tail", "own")}
    large = make_application("large", "head", "middle", "tail", weight=1.0)
    small = make_application("small", "own", "middle", "tail", weight=0.1)
    other = make_application("other", "x", weight=3.0)
    placed = place(BlockCatalog({**blocks, "x": make_block(fixed_s=0.03)}, [large, small, other]))
    assert devices_of(placed, "own") <= devices_of(placed, "middle")


def test_popular_chains_have_more_instances():
    catalog = BlockCatalog(
        {"a": make_block(), "b": make_block()},
        [make_application("popular", "a", weight=3.0), make_application("rare", "b", weight=1.0)],
    )
    placed = place(catalog)
    assert (len(devices_of(placed, "a")), len(devices_of(placed, "b"))) == (3, 1)
    assert sum(each.load for each in placed) == pytest.approx(4)


def test_a_chain_without_room_is_cut_at_its_least_traffic_and_stays_on_one_server():
    blocks = {name: make_block(gigabytes=3) for name in ("a", "b", "c", "d")}
    long, short = make_application("long", "a", "b", "c", "d"), make_application("short", "c", "d", weight=5.0)
    placed = place(BlockCatalog(blocks, [long, short]), servers=(2, 2), memory=9)
    of_long = {name: devices_of(placed, name) for name in blocks}
    assert of_long["a"] == of_long["b"]
    assert of_long["c"] == of_long["d"]
    (device,) = of_long["a"]
    assert any(each // 2 == device // 2 for each in of_long["c"])


def test_fragments_are_filled_by_the_largest_first():
    sizes = {"a": 5, "b": 4, "c": 3, "d": 2}
    catalog = BlockCatalog(
        {name: make_block(gigabytes=size) for name, size in sizes.items()},
        [make_application(name, name) for name in sizes],
    )
    placed = place(catalog, PlacementRule.FRAGMENTATION, servers=(4,), memory=12)
    assert len({each.device for each in placed}) == 4  # the bound on load is the same as for locality
    tight = place(catalog, PlacementRule.FRAGMENTATION, servers=(1,), memory=14)
    assert {each.device for each in tight} == {0}
    with pytest.raises(DoesNotFit, match="no device has"):
        place(catalog, servers=(1,), memory=4)


def test_blocks_with_the_same_weights_are_on_a_device_once():
    blocks = {"a": make_block(gigabytes=6), "b": make_block(gigabytes=6)}
    applications = [make_application("a", "a"), make_application("b", "b")]
    shared = BlockCatalog(blocks, applications, weights={"a": "w", "b": "w"})
    topology = BlockTopology(servers=(1,), memory_bytes=10 * GB)
    cluster = BlockCluster(shared, topology, BatchConfig())
    for each in place(shared, servers=(1,)):
        cluster.add_instance(each.block, each.device, 0.0)
    assert cluster.devices[0].weight_bytes == 6 * GB
    cluster.check_integrity()
    cluster.remove_instance(cluster.devices[0].instances["a"])
    assert cluster.devices[0].weight_bytes == 6 * GB
    with pytest.raises(DoesNotFit):
        place(BlockCatalog(blocks, applications), servers=(1,))


def test_blocks_run_as_one_only_while_nothing_else_comes_between():
    traffic = TrafficCounter()
    traffic.add_chain(("a", "b", "c"), 5)
    assert traffic.is_single("a", "b")
    assert not traffic.is_single("b", "a")
    traffic.add("x", "b")
    assert not traffic.is_single("a", "b")
    assert traffic.is_single("c", "a")
    assert traffic.between("a", "b") == traffic.between("b", "a") == 5


ONE = make_application("one", "a")


def scaling_cluster(requests: int = 40) -> BlockCluster:
    cluster = make_small_cluster({"a": make_block(kv_bytes=GB // 1000)}, [ONE], [("a", 0)], memory=10.0, servers=(1, 1))
    for number in range(requests):
        settle(cluster, make_request(number, ONE), [0])
    return cluster


def test_an_instance_with_a_long_queue_gets_a_second_one_and_gives_it_half_of_its_requests():
    cluster = scaling_cluster()
    assert queue_share(cluster.devices[0]) == pytest.approx(40 * 128 / 9000)
    (found,) = choose_scale_outs(cluster, TrafficCounter(), BlockScalingConfig(), 0.0)
    assert (found.blocks, found.source, found.target, found.missing) == (("a",), 0, 1, ("a",))
    assert found.load_s == pytest.approx(1 * GB / 12.5e9)
    target = cluster.add_instance("a", 1, found.load_s)
    assert not choose_scale_outs(cluster, TrafficCounter(), BlockScalingConfig(), 0.0)  # one is on its way
    moved = requests_to_move(cluster, found)
    assert [(each.number, positions) for each, positions in moved] == [(number, [0]) for number in range(39, 19, -1)]
    for request, _ in moved:
        cluster.move(request, 0, target, 1.0)
    cluster.check_integrity()
    assert not requests_to_move(cluster, found)  # both have as many


def test_nothing_scales_below_the_bound_or_without_a_better_device():
    assert not choose_scale_outs(scaling_cluster(30), TrafficCounter(), BlockScalingConfig(), 0.0)
    cluster = scaling_cluster()
    cluster.devices[1].busy_until = 100.0
    assert not choose_scale_outs(cluster, TrafficCounter(), BlockScalingConfig(), 0.0)


def test_a_request_on_its_first_pass_does_not_move():
    cluster = scaling_cluster(2)
    first = make_request(9, ONE)
    cluster.assign(first, cluster.devices[0].instances["a"])
    cluster.add_instance("a", 1, 0.0)
    plan = ScaleOut(("a",), 0, 1, (), 0.0, ())
    assert [each.number for each, _ in requests_to_move(cluster, plan)] == [1]
