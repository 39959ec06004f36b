"""The simulator of block instances: every request ends once, sums hold at all times, and figures follow from the rules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from symbiosis.cluster.policies.blocks.block_cost import BLOCK_PROFILES, BlockCost, read_block_profile
from symbiosis.cluster.policies.blocks.block_placement import PlacementRule
from symbiosis.cluster.policies.blocks.block_policy import BlockPolicyConfig
from symbiosis.cluster.policies.blocks.block_scaling import BlockScalingConfig
from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.dispatch import DispatchConfig, KvRule
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.cluster.simulation.blocks.applications import BlockSystem, make_applications, make_catalog
from symbiosis.cluster.simulation.blocks.block_experiment import make_workload, run_blocks, workload_of
from symbiosis.cluster.simulation.blocks.block_simulator import BlockSimulator
from symbiosis.cluster.simulation.trace import Trace
from symbiosis.errors import BadProfile, DoesNotFit
from tests.cluster.blocks.small import GB, make_application, make_block

PROFILE = BLOCK_PROFILES["a100"]
TIGHT = BlockTopology(memory_bytes=40 * GB)


def make_trace(*requests: tuple[float, int, int, str]) -> Trace:
    arrivals, prompts, outputs, names = (list(each) for each in zip(*requests, strict=True))
    return Trace("by hand", arrivals, prompts, outputs, names)


def workload(count: int = 10, requests: int = 80, duration_s: float = 2.0, output: float = 30, seed: int = 3):
    return make_workload(count, PROFILE, requests=requests, duration_s=duration_s, prompt=200, output=output, seed=seed)


def run_watched(work, system=BlockSystem.BLOCKS, topology=BlockTopology(), config=BlockPolicyConfig(), max_loss=0.0):  # noqa: B008
    def watch(simulator: BlockSimulator) -> None:
        simulator.cluster.check_integrity(simulator.requests.values())

    catalog = make_catalog(system, work.applications, PROFILE, max_loss=max_loss)
    simulator = BlockSimulator(work.trace, catalog, topology, config, watch=watch)
    run = simulator.run()
    simulator.cluster.check_integrity()
    assert all(device.kv_bytes == 0 for device in simulator.cluster.devices)
    assert not any(instance.requests or len(instance.queue) for instance in simulator.cluster.instances)
    return run


def test_one_request_on_idle_devices_takes_the_time_of_its_blocks():
    blocks = {"a": make_block(), "b": make_block()}
    catalog = BlockCatalog(blocks, [make_application("one", "a", "b")])
    topology = BlockTopology(servers=(1,), memory_bytes=4 * GB, run_s=0.0)
    run = BlockSimulator(make_trace((0.0, 100, 3, "one")), catalog, topology, BlockPolicyConfig()).run()
    (served,) = run.served
    first, later = 2 * (0.01 + 100 * 1e-4), 2 * (0.01 + 1e-4)
    assert served.first_token_s == pytest.approx(first)
    assert served.latency_s == pytest.approx(first + 2 * later)
    assert run.row_bytes == run.hops == 0


def test_blocks_on_two_servers_add_links_for_every_token():
    blocks = {"a": make_block(gigabytes=3, row_bytes=1250), "b": make_block(gigabytes=3, row_bytes=1250)}
    catalog = BlockCatalog(blocks, [make_application("one", "a", "b")])
    topology = BlockTopology(servers=(1, 1), memory_bytes=4 * GB, run_s=0.0, net_s=0.001)
    run = BlockSimulator(make_trace((0.0, 100, 3, "one")), catalog, topology, BlockPolicyConfig()).run()
    (served,) = run.served
    assert run.hops == 2 * 3 - 1
    assert run.row_bytes == 1250 * (100 + 2 * 2)
    computed_s = 2 * (0.01 + 100 * 1e-4) + 4 * (0.01 + 1e-4)
    assert served.latency_s == pytest.approx(computed_s + 5 * 0.001, rel=1e-3)


def test_requests_of_a_shared_block_run_in_one_batch():
    def latency(*blocks: str) -> float:
        applications = [make_application(name, block) for name, block in zip(("x", "y"), blocks, strict=True)]
        catalog = BlockCatalog({block: make_block() for block in blocks}, applications)
        topology = BlockTopology(servers=(1,), memory_bytes=8 * GB)
        trace = make_trace((0.0, 10, 50, "x"), (0.0, 10, 50, "y"))
        return max(each.latency_s for each in BlockSimulator(trace, catalog, topology, BlockPolicyConfig()).run().served)

    assert latency("a", "a") < 0.6 * latency("a", "b")


@pytest.mark.parametrize("system", list(BlockSystem))
@pytest.mark.parametrize("topology", [BlockTopology(), TIGHT], ids=["room", "tight"])
def test_every_request_ends_once_in_every_system(system, topology):
    work = workload()
    run = run_watched(work, system, topology)
    assert sorted(each.number for each in run.served) == list(range(80))
    assert [each.output for each in sorted(run.served, key=lambda each: each.number)] == work.trace.outputs


@pytest.mark.parametrize("rule", list(KvRule))
def test_every_request_ends_once_without_memory_for_all(rule):
    work = workload(requests=150, duration_s=0.5, output=100)
    small = BlockTopology(servers=(1, 1), memory_bytes=27 * GB)
    config = BlockPolicyConfig(dispatch=DispatchConfig(kv_rule=rule), scaling=BlockScalingConfig(queue_share=0.2))
    only = [each for each in work.applications if each.foundation != "13b"]
    names = [each.name for each in only]
    trace = replace_names(work.trace, names)
    run = run_watched(type(work)(only, trace), topology=small, config=config)
    assert sorted(each.number for each in run.served) == list(range(150))
    assert run.preemptions + run.moves > 0


def replace_names(trace: Trace, names: list[str]) -> Trace:
    chosen = [names[index % len(names)] for index in range(len(trace))]
    return Trace(trace.name, trace.arrivals, trace.prompts, trace.outputs, chosen)


def test_a_run_is_repeated_to_the_bit():
    def figures():
        return replace(run_blocks(BlockSystem.BLOCKS, workload(), PROFILE), seconds=0.0)

    assert figures() == figures()


def test_locality_sends_less_between_servers_than_fragments():
    def gigabytes(rule: PlacementRule) -> float:
        config = BlockPolicyConfig(placement=rule)
        return run_blocks(BlockSystem.BLOCKS, workload(20, 60), PROFILE, config=config).between_servers_gb

    assert gigabytes(PlacementRule.LOCALITY) < 0.3 * gigabytes(PlacementRule.FRAGMENTATION)


def test_the_chain_of_every_request_is_reported_and_within_the_bound():
    work = workload(12, 400, 0.2, 60)
    for max_loss, is_used in ((0.4, True), (0.1, False)):
        run = run_watched(work, max_loss=max_loss)
        catalog = make_catalog(BlockSystem.BLOCKS, work.applications, PROFILE, max_loss=max_loss)
        assert any(each.loss for each in run.served) == is_used
        for each in run.served:
            chains = {chain.blocks: chain.loss for chain in catalog.applications[each.application].allowed}
            assert chains[each.chain] == each.loss <= max_loss
    assert not any(each.loss for each in run_watched(work).served)


def test_a_request_that_fits_no_device_is_rejected():
    catalog = BlockCatalog({"a": make_block(kv_bytes=GB // 100)}, [make_application("one", "a")])
    topology = BlockTopology(servers=(1,), memory_bytes=2 * GB)
    trace = make_trace((0.0, 900, 10, "one"), (0.0, 20, 10, "one"))
    run = BlockSimulator(trace, catalog, topology, BlockPolicyConfig()).run()
    assert run.rejected == 1
    assert [each.number for each in run.served] == [1]
    with pytest.raises(DoesNotFit):
        BlockSimulator(trace, catalog, BlockTopology(servers=(1,), memory_bytes=GB // 2), BlockPolicyConfig())


def test_systems_hold_weights_as_they_share_them():
    applications = make_applications(20, PROFILE, 0)
    full = [each for each in applications if each.kind == "full"]
    assert len(full) == 3

    def total(system: BlockSystem) -> int:
        catalog = make_catalog(system, applications, PROFILE)
        present: list[str] = []
        size = 0
        for block in catalog.used:
            size += catalog.added_bytes(block, present)
            present.append(block)
        return size

    whole = {name: cost.whole.weight_bytes for name, cost in PROFILE.models.items()}
    assert total(BlockSystem.PER_MODEL) == sum(whole[each.foundation] for each in applications)
    shared = sum(whole.values()) + sum(whole[each.foundation] for each in full)
    assert total(BlockSystem.PARAMETER_SHARING) == total(BlockSystem.MULTI_ADAPTER) == shared
    assert sum(whole.values()) < total(BlockSystem.BLOCKS) < shared


def test_a_recorded_trace_is_given_to_applications():
    trace = make_trace((0.0, 5000, 10, "c1"), (1.0, 10, 5000, "c2"), (2.0, 10, 10, "c1"))
    work = workload_of(trace, 5, PROFILE, seed=0)
    assert work.trace.adapters[0] == work.trace.adapters[2]
    assert all(prompt + output <= 1024 for prompt, output in zip(work.trace.prompts, work.trace.outputs, strict=True))


def test_segments_of_a_model_add_up_to_it():
    model = PROFILE.models["7b"]
    parts = model.segment(0, 8) + model.segment(8, 24) + model.segment(24, 32)
    assert parts.weight_bytes == model.whole.weight_bytes == pytest.approx(13.5e9, rel=0.01)
    assert parts.batch_s(3, 1000, 50, 99.0) == pytest.approx(model.whole.batch_s(3, 1000, 50, 99.0))
    assert model.whole.kv_bytes == 4 * 4096 * 32


def test_a_profile_is_read_back_and_a_bad_one_is_one_line(tmp_path):
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps({"block_profile": PROFILE.to_json()}))
    assert read_block_profile(str(path)) == PROFILE
    for content in ("x", "[]", '{"block_profile": {"models": {}}}', '{"block_profile": {"models": {"a": 1}}}'):
        path.write_text(content)
        with pytest.raises(BadProfile):
            read_block_profile(str(path))
    with pytest.raises(BadProfile, match="No such file"):
        read_block_profile("missing.json")
    with pytest.raises(BadProfile, match="fixed_s"):
        BlockCost(fixed_s=-1.0)
