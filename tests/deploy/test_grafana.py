"""The Grafana board: each metric and label of its queries is one that a cluster exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from transformers import AutoModelForCausalLM

from symbiosis.jobs.states import JobState
from tests.app.cluster.running_cluster import ADMIN, KEYS, RunningCluster
from tests.deploy.chart import ROOT
from tests.lora import with_random_lora

pytestmark = pytest.mark.timeout(600)
BOARD = json.loads((ROOT / "deploy/grafana/symbiosis.json").read_text())
SELECTOR = re.compile(r"(symbiosis_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
PARTS = {
    "requests",
    "tokens",
    "first token",
    "output token",
    "running",
    "waiting",
    "kv cache",
    "adapter",
    "failed",
    "moved",
    "jobs",
}


def queries() -> list[str]:
    variables = [each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]] + variables


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Iterator[dict[str, list[Sample]]]:
    """Samples by name, of a cluster that has served a request with an adapter."""
    folder = tmp_path_factory.mktemp("cluster")
    cluster = RunningCluster(folder, count=1)
    try:
        with_random_lora(AutoModelForCausalLM.from_pretrained(cluster.model)).save_pretrained(folder / "lora")
        cluster.host.ask("load", name="pirate", folder=str(folder / "lora"), replace=True)
        cluster.client(KEYS["ann"]).completions.create(
            model="pirate", prompt="hi", max_tokens=4, extra_body={"ignore_eos": True}
        )
        cluster.until(lambda: cluster.metric("symbiosis_inter_token_seconds_count"))
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(cluster.ask("GET", "/metrics", ADMIN).text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        yield samples
    finally:
        cluster.close()


def test_queries_name_exported_metrics_and_labels(exported):
    for query in queries():
        found = SELECTOR.findall(query)
        assert found, query
        labels: set[str] = set()
        for name, matchers in found:
            assert name in exported, f"{name} is not exported: {query}"
            own = {label for sample in exported[name] for label in sample.labels}
            labels |= own
            for label, sign, value in MATCHER.findall(matchers):
                assert label in own, f"{name} has no label {label}: {query}"
                if sign in ("=", "!=") and label == "state":
                    assert value in set(JobState), query
                elif sign == "=":
                    assert value in {sample.labels[label] for sample in exported[name]}, query
        for names in re.findall(r"by \(([^)]*)\)", query):
            assert {each.strip() for each in names.split(",")} <= labels, query
        for name in re.findall(r"label_values\(\w+, (\w+)\)", query):
            assert name in labels, query


def test_legends_are_labels_of_the_query(exported):
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            (name, _), *_ = SELECTOR.findall(target["expr"])
            own = {label for sample in exported[name] for label in sample.labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= own


def test_engines_have_labels_of_engine_node_and_adapter(exported):
    for name, samples in exported.items():
        if name.startswith("symbiosis_cluster_engine_"):
            assert all(sample.labels.keys() >= {"engine", "node"} for sample in samples), name
    (adapter,) = exported["symbiosis_cluster_engine_adapter"]
    assert (adapter.labels["adapter"], adapter.labels["node"]) == ("pirate", "127.0.0.1")


def test_each_cluster_metric_is_on_the_board(exported):
    shown = {name for query in queries() for name, _ in SELECTOR.findall(query)}
    known = {name for name in exported if name.startswith("symbiosis_cluster_")}
    # requests that run and steps of engines say less than tokens
    assert known - shown == {"symbiosis_cluster_requests", "symbiosis_cluster_engine_steps"}


def test_panels_do_not_overlap_and_use_variables_of_the_board():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
    titles = " ".join(panel["title"].lower() for panel in BOARD["panels"])
    assert all(part in titles for part in PARTS), titles
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)(\w+)", " ".join(queries())))
    assert used <= variables
