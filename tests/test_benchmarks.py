"""Each benchmark runs at its tiniest size."""

from __future__ import annotations

import json

import pytest

from benchmarks import independence, memory, policies


@pytest.mark.parametrize(
    ("benchmark", "plan"),
    [
        (policies, policies.Plan(batches=(1, 4, 16), seconds=0.5, warm_up=0.2, repetitions=1, tiny=True)),
        (independence, independence.Plan(steps=2, repetitions=1, tiny=True)),
        (memory, memory.Plan(cases=((1, 8), (2, 16)), tiny=True)),
    ],
    ids=["policies", "independence", "memory"],
)
def test_a_benchmark_runs_and_writes_its_figures_with_machine_and_versions(benchmark, plan, tmp_path):
    benchmark.run(plan, tmp_path)
    (written,) = tmp_path.glob("*.json")
    record = json.loads(written.read_text())
    assert {"question", "machine", "runs"} <= record.keys()
    assert record["machine"]["torch"]
