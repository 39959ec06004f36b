from __future__ import annotations

from symbiosis.server.metrics.counts import Metrics, MetricSums
from symbiosis.server.metrics.prometheus import render


def test_sums_are_over_processes_tenants_and_routes():
    sums = MetricSums()
    for tenant in ("ann", "bob", "ann"):  # three processes
        metrics = Metrics()
        metrics.count_request("/v1/completions", 200, 0.3, tenant)
        metrics.count_request("/health", 200, 0.01)
        metrics.count_prompt(tenant, 5)
        metrics.count_tokens(tenant, 2)
        metrics.time_first(0.03)
        sums.add(metrics.take())
        assert metrics.take() == []
    assert sums.tenants()["ann"] == {
        "requests": 2,
        "prompt_tokens": 10,
        "generated_tokens": 4,
        "training_steps": 0,
        "trained_tokens": 0,
    }
    http = sums.http()
    assert {"route": "/health", "status": "200", "count": 3} in http["requests"]
    first = http["time_to_first_token_seconds"]
    assert (sum(first["counts"]), first["counts"][first["bounds"].index(0.04)]) == (3, 3)
    assert len(first["counts"]) == len(first["bounds"]) + 1
    assert sum(http["inter_token_seconds"]["counts"]) == 0


def test_unknown_names_and_labels_are_dropped():
    sums = MetricSums()
    sums.add([["nonsense", [], [1]], ["requests", ["ann", "bob"], [1]], ["requests", ["ann"], [1, 2, 3]]])
    assert sums.tenants()["ann"]["requests"] == 1


def test_a_lost_engine_is_reported_as_down():
    lines = render(None).decode().splitlines()
    assert "symbiosis_engine_up 0.0" in lines
    assert "symbiosis_requests_running 0.0" in lines
