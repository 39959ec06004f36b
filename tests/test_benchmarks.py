"""Each benchmark runs at its tiniest size."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch

from benchmarks import (
    adapter_kernels,
    adapter_loads,
    busy_cores,
    cluster_kills,
    cluster_live,
    cluster_replay,
    cluster_simulation,
    colocation,
    decode_attention,
    deferral,
    engine_host_blocks,
    gpu_colocation,
    gpu_memory,
    gpu_policies,
    gpu_prefill,
    gpu_serving,
    gpu_training,
    independence,
    kernel_launch,
    kv_copies,
    long_context,
    lora,
    memory,
    mixed,
    network,
    plan_memory,
    plots,
    policies,
    queueing,
    serving,
    shard_memory,
    sharding,
    sharing,
    small_and_large,
    token_draw,
    wire_compression,
    zoo_admission,
    zoo_serving,
    zoo_simulation,
    zoo_speculation,
    zoo_surrogates,
)
from benchmarks.http_load import benchmark as http_load
from benchmarks.results import compared
from benchmarks.vllm_cpu import benchmark as vllm_cpu
from tests.network.emulated_link import why_unavailable


@pytest.mark.parametrize(
    ("benchmark", "plan"),
    [
        pytest.param(
            policies, policies.Plan(batches=(1, 4), seconds=0.3, warm_up=0.2, repetitions=1, tiny=True), marks=pytest.mark.slow
        ),
        pytest.param(independence, independence.Plan(steps=2, repetitions=1, tiny=True), marks=pytest.mark.slow),
        pytest.param(memory, memory.Plan(cases=((1, 8), (2, 16)), tiny=True), marks=pytest.mark.slow),
    ],
    ids=["policies", "independence", "memory"],
)
def test_a_benchmark_runs_and_writes_its_figures_with_machine_and_versions(benchmark, plan, tmp_path):
    benchmark.run(plan, tmp_path)
    (written,) = tmp_path.glob("*.json")
    record = json.loads(written.read_text())
    assert {"question", "machine", "runs"} <= record.keys()
    assert record["machine"]["torch"]


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [
        pytest.param(sharing, ["--seconds", "0.1", "--tenants", "1", "2"], marks=pytest.mark.slow),
        pytest.param(deferral, ["--seconds", "0.05", "--round-trip-ms", "1"], marks=pytest.mark.slow),
        pytest.param(lora, ["--seconds", "0.1"], marks=pytest.mark.slow),
        pytest.param(gpu_memory, [], marks=pytest.mark.slow),
        pytest.param(gpu_policies, ["--seconds", "0.2"], marks=pytest.mark.slow),
        pytest.param(small_and_large, ["--seconds", "0.1"], marks=pytest.mark.slow),
        pytest.param(gpu_policies, ["--seconds", "0.2", "--remote", "3"], marks=pytest.mark.slow),
        pytest.param(gpu_policies, ["--seconds", "0.2", "--remote", "2"], marks=pytest.mark.slow),
        pytest.param(mixed, ["--seconds", "0.2"], marks=pytest.mark.slow),
        (gpu_serving, ["--repetitions", "1"]),
        (gpu_prefill, ["--repetitions", "1"]),
        pytest.param(long_context, [], marks=pytest.mark.slow),
        (engine_host_blocks, []),
        (decode_attention, ["--repetitions", "1"]),
        (token_draw, ["--repetitions", "1"]),
        pytest.param(gpu_training, ["--seconds", "0.1"], marks=pytest.mark.slow),
        pytest.param(gpu_training, ["--seconds", "0.1", "--scale"], marks=pytest.mark.slow),
        pytest.param(gpu_training, ["--seconds", "0.1", "--fair"], marks=pytest.mark.slow),
        pytest.param(gpu_colocation, ["--seconds", "1", "--rounds", "1"], marks=pytest.mark.slow),
        pytest.param(gpu_colocation, ["--seconds", "1", "--rounds", "1", "--load", "chat"], marks=pytest.mark.slow),
        pytest.param(http_load, [], marks=pytest.mark.slow),
        pytest.param(http_load, ["--burst", "--text"], marks=pytest.mark.slow),
        pytest.param(http_load, ["--open", "--lengths", "azure_conv", "--adapters", "3"], marks=pytest.mark.slow),
        pytest.param(http_load, ["--soak", "10"], marks=pytest.mark.slow),
    ],
    ids=[
        "sharing",
        "deferral",
        "lora",
        "gpu_memory",
        "gpu_policies",
        "small_and_large",
        "remote",
        "partly remote",
        "mixed",
        "gpu_serving",
        "gpu_prefill",
        "long_context",
        "engine_host_blocks",
        "decode_attention",
        "token_draw",
        "gpu_training",
        "scale",
        "fair",
        "gpu_colocation",
        "chat",
        "http_load",
        "http_load_burst",
        "http_load_open",
        "http_load_soak",
    ],
)
def test_a_benchmark_of_the_gpu_runs_without_one_and_can_be_plotted(benchmark, options, tmp_path):
    benchmark.main(["tiny", "--cpu", "--out", str(tmp_path), *options])
    (written,) = tmp_path.glob("*.json")
    record = json.loads(written.read_text())
    assert {"question", "machine", "script", "shape"} <= record.keys()
    drawn = plots.draw(written)
    assert drawn is not None
    assert drawn.is_file()


def test_serving_gives_the_completions_of_peft(tmp_path):
    figures = serving.run(tiny=True, repetitions=1, folder=tmp_path)
    assert set(figures["equal_answers"].values()) == {8}
    assert (tmp_path / "serving-tiny.json").is_file()


@pytest.mark.slow
def test_serving_next_to_training_is_measured(tmp_path):
    figures = colocation.run(colocation.TINY, tmp_path)
    assert figures["ratios"].keys() == {"1 at a time", "2 at a time"}
    trained = figures["training_rows_per_s"]  # with so few tokens, the tenant may not train at all
    assert trained.keys() == {"training alone", "1 at a time, with training", "2 at a time, with training"}
    assert trained["training alone"] > 0
    assert (tmp_path / "colocation-tiny.json").is_file()


def test_queueing_completes_all_requests_and_reports_their_time(tmp_path):
    figures = queueing.run(tiny=True, repetitions=1, folder=tmp_path)
    assert figures["request_s"].keys() == figures["host_pass_s"].keys() == {"4", "8", "16"}
    assert (tmp_path / "queueing-tiny.json").is_file()


@pytest.mark.slow
def test_the_network_benchmark_reports_times_round_trips_and_bytes(tmp_path):
    if why_unavailable() is not None:
        pytest.skip(str(why_unavailable()))
    network.main(["--tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "network.json").read_text())
    assert {cell["work"] for cell in record["runs"]} >= {"step", "micro_batches", "decode"}
    assert all(cell["round_trips"] > 0 and cell["wire_bytes"] > 0 for cell in record["runs"])
    assert (tmp_path / "network.png").is_file()


def test_the_benchmark_of_compression_reports_bytes_and_times(tmp_path):
    wire_compression.main(["--tiny", "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "wire-compression.json").read_text())["runs"]
    assert {run["codec"] for run in runs} == set(wire_compression.CODECS)


def test_the_simulation_of_a_cluster_is_compared_with_its_baselines(tmp_path):
    cluster_simulation.main(["--tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "cluster-simulation-tiny.json").read_text())
    assert {"symbiosis", "ray-serve:4", "ray-serve:8"} < record["kept"].keys()
    assert all(hours > 0 for hours in record["gpu_hours"].values())
    assert (tmp_path / "cluster-simulation-tiny.png").is_file()
    assert json.loads((tmp_path / "cluster-decisions-tiny.json").read_text())["decisions"] == 50


@pytest.mark.slow
def test_zoos_are_simulated_and_compared(tmp_path):
    zoo_simulation.main(["--tiny", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "zoo-simulation-10.json").read_text())
    assert set(found["changes"]) >= set(zoo_simulation.AGAINST)
    assert {run["requests"] for runs in found["runs"].values() for run in runs} == {40}
    assert (tmp_path / "zoo-simulation-10.png").is_file()
    for name in ("kv", "overload"):
        assert (tmp_path / f"zoo-simulation-{name}.json").is_file()


@pytest.mark.slow
def test_serving_a_zoo_is_compared_with_engines_of_one_model_and_resumed(tmp_path):
    zoo_serving.main(["tiny", "--out", str(tmp_path), "--mixes", "shared"])
    first = json.loads((tmp_path / "zoo-serving-tiny.json").read_text())
    zoo_serving.main(["tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "zoo-serving-tiny.json").read_text())
    assert record["runs"]["shared"] == first["runs"]["shared"]
    for mix in zoo_serving.MIXES:
        assert record["medians"][mix].keys() == set(zoo_serving.SYSTEMS)
        assert record["equal_answers"][mix] == [12, 12]
    assert record["bytes"]["shared"]["zoo"] < record["bytes"]["nothing shared"]["zoo"]
    assert (tmp_path / "zoo-serving-tiny.png").is_file()


@pytest.mark.slow
def test_adapter_loads_are_counted_and_can_be_plotted(tmp_path):
    adapter_loads.main(["--tiny", "--systems", "symbiosis", "--out", str(tmp_path)])
    (written,) = tmp_path.glob("*.json")
    record = json.loads(written.read_text())
    (row,) = record["rows"]
    assert record["ray_serve_missing"]
    assert 0 < row["symbiosis"]["loads_per_request"] < 1
    assert row["symbiosis"]["engines_of_hottest"][0] >= 1
    assert plots.draw(written).is_file()


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ),
    reason="needs a CUDA device or Triton's interpreter",
)


@needs_triton
@pytest.mark.parametrize("options", [[], ["--sweep"]], ids=["compared", "swept"])
def test_kernels_of_serving_are_measured(options, tmp_path):
    adapter_kernels.main(["--tiny", "--repetitions", "1", "--out", str(tmp_path), *options])
    (written,) = tmp_path.glob("*.json")
    record = json.loads(written.read_text())
    assert {"question", "machine", "script", "triton"} <= record.keys()


@needs_triton
def test_launches_are_measured(tmp_path):
    figures = kernel_launch.run(tiny=True, repetitions=1, folder=tmp_path)
    assert [each["kernel"] for each in figures["kernels"]] == ["rms_norm", "silu_mul"]
    assert (tmp_path / "kernel-launch-tiny.json").is_file()


def test_ratios_are_taken_within_one_repetition():
    figures = compared({"plain": [1.0, 2.0, 4.0], "shared": [1.1, 2.2, 4.4]}, "plain")
    assert figures["shared"]["ratio"] == pytest.approx(1.1)
    assert figures["shared"]["median"] == 2.2
    assert figures["shared"]["runs"] == [1.1, 2.2, 4.4]


@pytest.mark.slow
def test_the_comparison_with_vllm_runs_without_it(tmp_path):
    shape = ["--requests", "2", "--prompt", "4", "--new", "2"]
    vllm_cpu.main(["--tiny", *shape, "--adapters", "0", "1", "--repetitions", "1", "--out", str(tmp_path)])
    (written,) = tmp_path.glob("*.json")
    figures = json.loads(written.read_text())["tokens_per_s"]
    assert figures["0"]["symbiosis"]["median"] > 0
    assert figures.keys() == {"0", "1"}


@pytest.mark.slow
def test_the_memory_of_shards_is_measured_and_can_be_plotted(tmp_path):
    shard_memory.main(["--tiny", "--out", str(tmp_path)])
    (written,) = tmp_path.glob("*.json")
    _, two = json.loads(written.read_text())["results"]
    assert len(two["ranks"]) == 2
    assert 0.5 <= two["share_of_tensors"] < 0.55
    assert plots.draw(written).is_file()


def test_an_engine_next_to_busy_processes_is_measured(tmp_path):
    busy_cores.main(["--tiny", "--repetitions", "1", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "busy-cores.json").read_text())
    assert {found["0"]["ratio"] for found in record["tokens_per_s_by_busy_processes"].values()} == {1.0}


@pytest.mark.slow
def test_copies_of_kv_blocks_are_measured(tmp_path):
    figures = kv_copies.main(["--cpu", "--tiny", "--out", str(tmp_path)])
    assert (tmp_path / "kv-copies-tiny.json").is_file()
    assert [row["tokens"] for row in figures["rows"]] == [256, 512]
    assert all(row["ratio"] > 0 and row["seconds"]["copy"] > 0 for row in figures["rows"])


@pytest.mark.slow
def test_a_cluster_is_compared_with_one_server_and_survives_what_the_benchmark_does(tmp_path):
    cluster_live.main(["tiny", "--cpu", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "cluster-live-tiny.json").read_text())
    assert record["front_door"]["cluster of one"]["ratio"] > 0
    for name in ("engine_killed", "node_lost", "scale_in", "rolling_restart"):
        assert (record[name]["interrupted"], record[name]["differ"]) == (0, 0), name


@pytest.mark.slow
def test_the_simulator_is_compared_with_a_live_cluster(tmp_path):
    cluster_replay.main(["tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "cluster-replay-tiny.json").read_text())
    assert all(ratio > 0 for ratio in record["simulated_of_live"].values())


@pytest.mark.slow
def test_kills_in_a_cluster_change_no_token(tmp_path):
    cluster_kills.main(["tiny", "--kills", "3", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "cluster-kills-tiny.json").read_text())
    assert sum(record["kills"].values()) == 3
    assert record["num_different"] == 0


@pytest.mark.slow
def test_the_ways_of_sharding_are_measured_and_can_be_plotted(tmp_path):
    sharding.main(["--tiny", "--out", str(tmp_path)])
    (written,) = tmp_path.glob("*.json")
    (result,) = json.loads(written.read_text())["results"]
    assert len(result["cells"]) == 12
    assert plots.draw(written).is_file()


@pytest.mark.slow
def test_plans_are_compared_with_measured_memory(tmp_path):
    plan_memory.main(["--tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "plan-memory.json").read_text())
    assert [run["role"] for run in record["runs"]] == ["executor", "tenant"]
    assert all(run["measured_bytes"] > 0 for run in record["runs"])


@pytest.mark.slow
def test_surrogates_are_made_and_measured_in_pieces(tmp_path):
    arguments = ["--tiny", "--out", str(tmp_path), "--zoo", str(tmp_path / "zoo" / "here")]
    zoo_surrogates.main(arguments)
    first = json.loads((tmp_path / "zoo_surrogates.json").read_text())
    assert set(first["surrogates"]) == {"ffn 1", "attention 1", "layer 1"}
    assert (tmp_path / "zoo_surrogates.png").is_file()
    zoo_surrogates.main(arguments)  # nothing is left to do
    assert json.loads((tmp_path / "zoo_surrogates.json").read_text())["surrogates"] == first["surrogates"]


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_speculation_over_a_link_has_the_same_tokens(tmp_path):
    zoo_speculation.main(["--tiny", "--out", str(tmp_path)])
    (cell,) = json.loads((tmp_path / "zoo_speculation.json").read_text())["runs"]
    assert cell["same_tokens"] == cell["tokens"] == 8
    assert (tmp_path / "zoo_speculation.png").is_file()


@pytest.mark.slow
def test_a_zoo_of_fine_tunes_is_made_and_measured_in_pieces(tmp_path):
    options = ["--tiny", "--build", str(tmp_path / "build"), "--out", str(tmp_path)]
    zoo_admission.main([*options, "--minutes", "0"])
    assert not (tmp_path / "zoo-admission-tiny.json").exists()
    zoo_admission.main([*options, "--minutes", "0", "--partial"])
    assert json.loads((tmp_path / "zoo-admission-tiny.json").read_text())["missing"]
    zoo_admission.main(options)
    record = json.loads((tmp_path / "zoo-admission-tiny.json").read_text())
    assert record["zoo"]["equal_to_the_bit"] == record["zoo"]["models"] == 3
    assert record["zoo"]["saved"]["full fine-tunes as admitted"] >= record["zoo"]["saved"]["by hash"] > 0
    assert all("measured" in case for case in record["cases"])
    assert (tmp_path / "zoo-admission-tiny.png").is_file()
