"""`symbiosis simulate` and `symbiosis profile`."""

from __future__ import annotations

import json
import re

from symbiosis.cli.views.simulation_view import format_duration
from tests.cli.test_main import fails, run_here
from tests.tiny_chat import make_tiny_chat

TINY = ("--trace", "ramp:rate=4,duration=60,prompt=200,output=20", "--gpus", 4)


def test_policies_are_compared_in_a_table_and_a_plot(tmp_path):
    plot = tmp_path / "cluster.png"
    result = run_here("simulate", *TINY, "--adapters", 4, "--policy", "symbiosis", "--policy", "ray-serve:4", "--plot", plot)
    assert result.exit_code == 0, result.output
    for shown in ("GPU-hours", "within the objective", "TTFT p99", "TPOT p99", "adapters loaded", "ray-serve:4"):
        assert shown in result.stdout
    assert re.search(r"ramp: [\d,]+ requests in (\d+ s|\d\.\d min), engines: h200-7b", result.stdout)
    assert "TTFT: time to the first token" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_has_the_figures_and_the_timeline():
    result = run_here("simulate", *TINY, "--json", "--fail-every", 20)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (run,) = found["runs"]
    assert run["requests"] > 100
    assert run["policy"] == "symbiosis"
    assert len(run["timeline"]["seconds"]) == len(run["timeline"]["batches"])
    assert found["step_cost"]["kv_tokens"] == 200_000


def test_a_trace_from_a_file(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n2023-11-16 18:17:05.03,318,8\n")
    result = run_here("simulate", "--trace", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["runs"][0]["requests"] == 2
    path.write_text(path.read_text() + "2023-11-16 18:17:06.03,x,8\n")
    assert "azure.csv, line 4: ContextTokens is 'x'" in fails("simulate", "--trace", path)


def test_what_is_wrong_is_one_line(tmp_path):
    assert "cannot read" in fails("simulate", "--trace", tmp_path / "missing.csv")
    assert "no policy 'best'" in fails("simulate", *TINY, "--policy", "best")
    assert "cannot read the profile" in fails("simulate", *TINY, "--profile", "h100")
    assert "no setting of a synthetic trace" in fails("simulate", "--trace", "poisson:speed=1")
    assert "is not after --begin" in fails("simulate", *TINY, "--begin", 2, "--end", 1)
    assert "cannot write" in fails("simulate", *TINY, "--plot", tmp_path / "none" / "x.png")
    assert "cannot write" in fails("profile", "--out", tmp_path)


def test_a_profile_of_the_real_engine_drives_the_simulator(tmp_path):
    model, out = make_tiny_chat(tmp_path / "tiny"), tmp_path / "profile.json"
    result = run_here("profile", model, "--quick", "--cache-gb", 0.01, "--out", out)
    assert result.exit_code == 0, result.output
    profile = json.loads(out.read_text())
    assert profile["step_cost"]["fixed_s"] > 0
    assert {step["rows"] for step in profile["steps"]} >= {0, 1, 4}
    simulated = run_here("simulate", "--trace", "poisson:rate=1,duration=20,prompt=50,output=5", "--profile", out, "--json")
    assert simulated.exit_code == 0, simulated.output
    assert json.loads(simulated.stdout)["step_cost"]["source"].startswith("tiny on cpu")


def test_durations_have_a_readable_unit():
    assert [format_duration(seconds / 3600) for seconds in (45, 288, 36_000)] == ["45 s", "4.8 min", "10.00 h"]
