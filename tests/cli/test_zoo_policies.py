"""`symbiosis zoo simulate` and `symbiosis zoo profile`."""

from __future__ import annotations

import json

import pytest

from symbiosis.zoo.zoo import Zoo
from tests.cli.test_main import fails, run_here
from tests.zoo.conftest import fine_tuned, make_model

SMALL = ("--applications", 6, "--requests", 40, "--duration", 1)


def test_systems_are_compared_in_a_table_and_a_plot(tmp_path):
    plot = tmp_path / "zoo.png"
    result = run_here("zoo", "simulate", *SMALL, "--system", "blocks", "--system", "per-model", "--plot", plot)
    assert result.exit_code == 0, result.output
    for shown in ("40 requests of 6 applications", "latency p95", "between servers", "per-model", "loss added, most"):
        assert shown in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_has_figures_chains_and_timeline():
    result = run_here(
        "zoo", "simulate", *SMALL, "--max-loss", 0.4, "--placement", "fragmentation", "--kv", "recompute", "--json"
    )
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert sum(run["chains"].values()) == run["requests"] == 40
    assert run["most_loss"] <= 0.4
    assert len(run["timeline"]["seconds"]) == len(run["timeline"]["queues_s"])


def test_a_recorded_trace_gives_arrivals_and_lengths(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n2023-11-16 18:17:05.03,318,8\n")
    result = run_here("zoo", "simulate", "--trace", path, "--applications", 3, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["runs"][0]["requests"] == 2


def test_what_is_wrong_is_one_line(tmp_path):
    assert "no system 'best'" in fails("zoo", "simulate", "--system", "best")
    assert "no placement 'near'" in fails("zoo", "simulate", "--placement", "near")
    assert "no rule 'copy'" in fails("zoo", "simulate", "--kv", "copy")
    assert "expected the devices of each server" in fails("zoo", "simulate", "--servers", "2,x")
    assert "expected the devices of each" in fails("zoo", "simulate", "--servers", "0")
    assert "cannot read the profile 'h100'" in fails("zoo", "simulate", "--profile", "h100")
    assert "no device has" in fails("zoo", "simulate", "--memory-gb", 1)
    assert "is not after --begin" in fails("zoo", "simulate", "--begin", 2, "--end", 1)
    assert "cannot write" in fails("zoo", "simulate", "--plot", tmp_path / "none" / "x.png")
    assert "cannot write" in fails("zoo", "profile", tmp_path, "--out", tmp_path)
    assert "is no zoo" in fails("zoo", "profile", tmp_path, "--out", tmp_path / "x.json")


@pytest.fixture
def tiny_zoo(tmp_path):
    base, zoo = make_model(), Zoo(tmp_path / "zoo", create=True)
    models = {"base": base, "tuned": fine_tuned(base, range(3, 4)), "wide": make_model(hidden_size=64, intermediate_size=96)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        zoo.add(name, tmp_path / name)
    return tmp_path / "zoo"


def test_a_profile_of_real_blocks_drives_the_simulator(tiny_zoo, tmp_path):
    out = tmp_path / "blocks.json"
    result = run_here("zoo", "profile", tiny_zoo, "--quick", "--out", out)
    assert result.exit_code == 0, result.output
    assert "base: 4 layers" in result.stdout
    assert "wide: 4 layers" in result.stdout
    content = json.loads(out.read_text())
    models = content["block_profile"]["models"]
    assert list(models) == ["base", "wide"]  # `tuned` has the shape of `base`
    attention = models["base"]["attention"]
    assert attention["kv_bytes"] == 2 * 2 * 8 * 4
    assert attention["row_bytes"] == 32 * 4
    assert models["base"]["ffn"]["weight_bytes"] >= 3 * 32 * 48 * 4
    assert models["base"]["attention"]["fixed_s"] + models["base"]["attention"]["row_s"] > 0
    (measured, *_) = content["measured"]["base"]["batches"]
    assert set(measured["seconds"]) == {"embedding", "attention", "ffn", "head"}
    assert sum(measured["seconds"].values()) < measured["total_s"]
    result = run_here("zoo", "simulate", *SMALL, "--profile", out, "--max-loss", 0.4)
    assert result.exit_code == 0, result.output
