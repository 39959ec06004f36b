"""One source of statistics: split tenants, HTTP and jobs joined, each seen only where it may be."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import symbiosis
from symbiosis.transport.statistics_client import fetch_statistics
from tests.server.conftest import ANN, BOB, CHIEF, RunningServer
from tests.server.job_client import FAST, created, until

TOKENS = {"ann": "a token of ann's", "bob": "a token of bob's", "provider": "a token of ours"}
EXACT = {"prompt": [5, 6, 7], "max_tokens": 4, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(world):
    """Tokens and keys of the same tenants, two workers."""
    with symbiosis.Executor(world.folder, hosting=True, tokens=TOKENS) as executor:
        options = {"keys": {"ann": ANN, "bob": BOB}, "admin_key": CHIEF, "workers": 2}
        with executor.host("127.0.0.1:0", adapters={"pirate": world.root / "pirate"}, **options) as hosting:
            yield RunningServer(hosting.url, hosting, executor)


@pytest.fixture(scope="module")
def used(served):
    """After requests, split calls and a job of ann, and requests of bob. Its statistics."""
    address = served.executor.listen()
    model = symbiosis.connect(address, token=TOKENS["ann"])
    model(torch.tensor([[5, 6, 7, 8]]))
    model.symbiosis.close()
    job = created(served.client(ANN), {**FAST, "n_steps": 3}, suffix="own")
    until(served.client(ANN), job.id, "succeeded")
    for key in (ANN, BOB):
        served.client(key).completions.create(model="tiny", **EXACT)
    served.client(BOB).completions.create(model="pirate", **EXACT)
    return address, served.executor.stats()


def test_a_tenant_has_one_row_over_all_ways_in(used):
    _, stats = used
    ann, bob = stats["tenants"]["ann"], stats["tenants"]["bob"]
    assert ann["calls"] > 0
    assert ann["tokens"] == 4
    assert (ann["prompt_tokens"], ann["generated_tokens"]) == (3, 4)
    assert ann["training_steps"] == 3
    assert ann["trained_tokens"] == stats["training"]["jobs"]["tokens"] > 0
    assert ann["jobs"] == {"succeeded": 1}
    assert len(ann["adapters"]) == 1
    assert (bob["calls"], bob["requests"], bob["prompt_tokens"], bob["generated_tokens"]) == (0, 2, 6, 8)
    assert (bob["jobs"], bob["adapters"]) == ({}, [])
    assert stats["jobs"]["succeeded"] == 1
    assert stats["calls"] == ann["calls"]
    assert stats["serving"]["tokens"] >= 12
    assert stats["serving"]["rows"] >= stats["serving"]["steps"] > 0
    assert stats["training"]["passes"]["steps"] == 3


def test_memory_by_owner_adds_up(served, used):
    _, stats = used
    memory = dict(stats["memory"]["cpu"])
    assert memory.pop("total") == sum(memory.values())
    model = served.executor._model
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    assert memory["base_weights"] >= sum(storages.values()), "once, although three parts compute with them"
    assert memory["base_weights"] < 2 * sum(storages.values())
    assert memory["kv_cache"] == 1024 * 16 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * (
        model.config.head_dim * 4
    )
    assert memory["adapters"] == stats["serving"]["adapter_cache"]["device_bytes"] > 0
    assert memory["training"] == 0, "the job has ended"
    assert memory["other"] > 0


def test_the_memory_of_training_is_that_of_its_sessions(served):
    client = served.client(BOB)
    job = created(client, {**FAST, "n_steps": 5000, "checkpoint_every": 5000})
    until(client, job.id, "running")
    while not served.executor.stats()["memory"]["cpu"]["training"]:
        assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    client.fine_tuning.jobs.cancel(job.id)
    while served.executor.stats()["memory"]["cpu"]["training"]:
        pass


def test_the_admin_gets_the_same_over_http(served, used):
    found = served.ask("GET", "/v1/statistics", CHIEF).json()
    assert found.keys() == used[1].keys()
    assert found["tenants"]["bob"].keys() == used[1]["tenants"]["bob"].keys()
    assert found["tenants"]["bob"]["generated_tokens"] == 8
    assert served.ask("GET", "/v1/statistics", ANN).status_code == 403


def test_prometheus_has_every_part(served, used):
    lines = served.ask("GET", "/metrics", CHIEF).text
    for line in (
        'symbiosis_tokens_total{kind="generation",tenant="bob"} 8.0',
        'symbiosis_tenant_requests_total{tenant="bob"}',
        'symbiosis_split_tokens_total{tenant="ann"} 4.0',
        'symbiosis_jobs{state="succeeded"} 1.0',
        'symbiosis_memory_bytes{device="cpu",owner="kv_cache"}',
        "symbiosis_split_batches_total",
        "symbiosis_training_passes_total",
    ):
        assert line in lines, line


def test_a_tenant_sees_its_own_row_and_nothing_of_others(used):
    address, _ = used
    for own, other in (("ann", "bob"), ("bob", "ann")):
        seen = fetch_statistics(address, token=TOKENS[own])
        assert set(seen["tenants"]) == {own}
        text = json.dumps(seen)
        assert f'"{other}' not in text
        assert "pirate" not in text
        assert not {"serving", "http", "jobs", "training", "history", "memory"} & seen.keys()
    assert seen["tenants"]["bob"]["generated_tokens"] == 8
    everything = fetch_statistics(address, token=TOKENS["provider"])
    assert {"ann", "bob"} <= everything["tenants"].keys()
    assert everything["serving"]["adapters"].keys() >= {"pirate"}


def test_without_tokens_a_link_shows_nothing_that_needs_a_key(world):
    with symbiosis.Executor(world.folder, hosting=True) as executor:
        with executor.host("127.0.0.1:0", keys={"ann": ANN}, adapters={"pirate": world.root / "pirate"}, workers=1) as hosting:
            server = RunningServer(hosting.url, hosting, executor)
            server.client(ANN).completions.create(model="tiny", **EXACT)
            seen = fetch_statistics(executor.listen())
            assert "ann" not in json.dumps(seen)
            assert "pirate" not in json.dumps(seen)
            assert seen["calls"] == 0
        assert executor.stats()["serving"] == {}, "the host is closed"
    with symbiosis.Executor(world.folder) as executor:
        seen = fetch_statistics(executor.listen())
        assert seen["memory"]["cpu"]["base_weights"] >= seen["bytes_held"]
        assert seen["http"] is None


def test_counts_are_exact_at_a_scrape_with_two_workers(served):
    client = served.client(BOB)
    for _ in range(10):
        before = served.executor.stats()["tenants"]["bob"]["generated_tokens"]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.completions.create(model="tiny", **EXACT), range(4)))
        assert served.executor.stats()["tenants"]["bob"]["generated_tokens"] == before + 16


def test_a_stuck_worker_does_not_block_statistics(served):
    pid = served.hosting._door.processes.pids[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert served.executor.stats()["serving"]["blocks"] == 1024
        address = served.executor.listen()
        assert fetch_statistics(address, token=TOKENS["provider"])["serving"]["blocks"] == 1024
    finally:
        os.kill(pid, signal.SIGCONT)
    served.client(ANN).completions.create(model="tiny", **EXACT)
    assert served.executor.stats()["tenants"]["ann"]["generated_tokens"] > 0


def test_the_history_grows_and_ends_with_now(served):
    while not (history := served.executor.stats()["history"])["uptime_s"]:
        pass
    assert len({len(series) for series in history.values()}) == 1
    assert history["memory_bytes"][-1] > 0
