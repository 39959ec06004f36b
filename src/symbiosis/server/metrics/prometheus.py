"""Prometheus text of the statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Statistics = Mapping[str, Any]

_TENANT_COUNTERS = {
    "requests": ("symbiosis_tenant_requests", "HTTP requests."),
    "training_steps": ("symbiosis_training_steps", "Optimizer steps of fine-tuning jobs."),
    "trained_tokens": ("symbiosis_trained_tokens", "Tokens that jobs were trained on."),
    "calls": ("symbiosis_split_calls", "Layer calls of split tenants."),
    "rows": ("symbiosis_split_rows", "Rows of these calls."),
    "training_rows": ("symbiosis_split_training_rows", "Rows of those that train."),
    "tokens": ("symbiosis_split_tokens", "Tokens that split tenants computed."),
    "errors": ("symbiosis_split_errors", "Errors that split tenants got."),
}
_SPLIT = {
    "batches": ("symbiosis_split_batches", "Batches of layer calls.", True),
    "busy_s": ("symbiosis_split_busy_seconds", "Time that the executor ran them.", True),
    "queued": ("symbiosis_split_queued", "Layer calls in the queue.", False),
    "sessions": ("symbiosis_split_sessions", "Open sessions of split tenants.", False),
}
_TRAINING = {
    "passes": ("symbiosis_training_passes", "Packed passes of hosted training."),
    "rows": ("symbiosis_training_rows", "Rows of these passes."),
    "sessions": ("symbiosis_training_pass_sessions", "Sessions in these passes: one pass of 8 sessions counts 8."),
    "seconds": ("symbiosis_training_pass_seconds", "Time of these passes."),
}
_ENGINE = {
    "running": ("symbiosis_requests_running", "Sequences that hold KV cache blocks."),
    "waiting": ("symbiosis_requests_waiting", "Sequences in the queue, preempted ones included."),
    "blocks": ("symbiosis_kv_cache_blocks", "Blocks of the KV cache."),
    "blocks_free": ("symbiosis_kv_cache_blocks_free", "Blocks that can be allocated."),
    "blocks_cached": ("symbiosis_kv_cache_blocks_cached", "Blocks kept for prefix caching."),
    "host_blocks": ("symbiosis_kv_cache_host_blocks", "Blocks of host memory for KV cache blocks that do not fit."),
    "host_blocks_used": ("symbiosis_kv_cache_host_blocks_used", "Host blocks that hold keys and values."),
    "host_blocks_stored": ("symbiosis_kv_cache_host_blocks_stored", "Blocks copied to host memory so far."),
    "host_blocks_restored": ("symbiosis_kv_cache_host_blocks_restored", "Blocks copied back so far."),
    "blocks_fetched": ("symbiosis_kv_cache_blocks_fetched", "Blocks received from other engines so far."),
    "blocks_sent": ("symbiosis_kv_cache_blocks_sent", "Blocks sent to other engines so far."),
    "preemptions": ("symbiosis_preemptions", "Preempted sequences so far."),
    "adapters_resident": ("symbiosis_adapters_resident", "Adapters in memory."),
    "adapters_loading": ("symbiosis_adapters_loading", "Adapters being loaded."),
    "adapter_loads": ("symbiosis_adapter_loads", "Adapters loaded so far."),
    "adapter_load_s": ("symbiosis_adapter_load_seconds", "Seconds spent loading them."),
    "adapter_cache.device": ("symbiosis_adapters_on_device", "Adapters in the device pool."),
    "adapter_cache.device_bytes": ("symbiosis_adapter_device_bytes", "Bytes of adapters in the device pool."),
    "adapter_cache.host": ("symbiosis_adapters_on_host", "Adapters in the host pool."),
    "adapter_cache.loading": ("symbiosis_adapters_transferring", "Adapters being copied to the device."),
    "adapter_cache.loads": ("symbiosis_adapter_device_loads", "Copies to the device so far."),
    "adapter_cache.load_s": ("symbiosis_adapter_device_load_seconds", "Seconds from request to completion of these copies."),
    "adapter_cache.device_evictions": ("symbiosis_adapter_evictions", "Evictions from the device so far."),
    "steps": ("symbiosis_engine_steps", "Engine steps so far."),
    "rows": ("symbiosis_engine_rows", "Rows of these steps."),
}


_ENGINES = {
    "running": ("symbiosis_cluster_engine_running", "Sequences that hold KV cache blocks, by engine."),
    "waiting": ("symbiosis_cluster_engine_waiting", "Sequences in the queue, by engine."),
    "blocks": ("symbiosis_cluster_engine_kv_blocks", "Blocks of the KV cache, by engine."),
    "blocks_free": ("symbiosis_cluster_engine_kv_blocks_free", "Blocks that can be allocated, by engine."),
    "adapters": ("symbiosis_cluster_engine_adapters", "Adapters that were loaded, by engine."),
    "jobs": ("symbiosis_cluster_engine_jobs", "Fine-tuning jobs that run, by engine."),
    "steps": ("symbiosis_cluster_engine_steps", "Steps so far, by engine."),
    "tokens": ("symbiosis_cluster_engine_tokens", "Sampled tokens so far, by engine."),
}
_CLUSTER = {
    "waiting": ("symbiosis_cluster_requests_waiting", "Requests that wait for an engine."),
    "placed": ("symbiosis_cluster_requests", "Requests of the cluster."),
    "migrations": ("symbiosis_cluster_migrations", "Requests that went on at another engine so far."),
    "jobs_waiting": ("symbiosis_cluster_jobs_waiting", "Fine-tuning jobs that found no engine with room."),
    "jobs_moved": ("symbiosis_cluster_jobs_moved", "Fine-tuning jobs that left a full or draining engine so far."),
    "wanted": ("symbiosis_cluster_engines_wanted", "Engines that the cluster keeps running."),
    "lost": ("symbiosis_cluster_engines_lost", "Engines that failed so far: they ended without having been let go."),
}


def _by_model(models: dict[str, Any]) -> Iterator[Metric]:
    """Of several models of one engine."""
    texts = {"requests": ("completions", "Completions of each model."), "tokens": ("tokens", "Sampled tokens of each model.")}
    for field, (name, text) in texts.items():
        family = CounterMetricFamily(f"symbiosis_model_{name}", text, labels=["model"])
        for model, values in models.items():
            family.add_metric([model], values[field])
        yield family


class _Families(Collector):
    def __init__(self, statistics: Statistics | None) -> None:
        self._is_up, self._statistics = statistics is not None, statistics or {}
        self._serving = self._statistics.get("serving") or {}

    def collect(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._tenants()
        yield from self._split()
        yield from self._training()
        yield self._memory()
        if "engines" in self._statistics:
            yield from self._cluster()
        yield GaugeMetricFamily(
            "symbiosis_engine_up", "Whether the engine is reachable.", value=int(self._is_up and bool(self._serving))
        )
        for key, (name, text) in _ENGINE.items():
            group, _, field = key.rpartition(".")
            values = self._serving.get(group, {}) if group else self._serving
            yield GaugeMetricFamily(name, text, value=values.get(field, 0))
        if models := self._serving.get("models"):
            yield from _by_model(models)

    def _cluster(self) -> Iterator[Metric]:
        engines, cluster = self._statistics["engines"], self._statistics["cluster"]
        status = GaugeMetricFamily(
            "symbiosis_cluster_engine_up", "Engines, with their status.", labels=["engine", "node", "status"]
        )
        adapters = GaugeMetricFamily(
            "symbiosis_cluster_engine_adapter", "Adapters that were loaded, by name.", labels=["engine", "node", "adapter"]
        )
        for engine, row in engines.items():
            status.add_metric([engine, row["node"], row["status"]], 1)
            for adapter in row["adapter_names"]:
                adapters.add_metric([engine, row["node"], adapter], 1)
        yield status
        yield adapters
        for field, (name, text) in _ENGINES.items():
            family = GaugeMetricFamily(name, text, labels=["engine", "node"])
            for engine, row in engines.items():
                family.add_metric([engine, row["node"]], row[field])
            yield family
        for field, (name, text) in _CLUSTER.items():
            yield GaugeMetricFamily(name, text, value=cluster[field])

    def _http(self) -> Iterator[Metric]:
        http = self._statistics.get("http") or {}
        text = "Requests by route and status; 499: the client disconnected."
        requests = CounterMetricFamily("symbiosis_requests", text, labels=["route", "status"])
        for each in http.get("requests", ()):
            requests.add_metric([each["route"], each["status"]], each["count"])
        yield requests
        text = "Latency of a request; of a stream, until it begins."
        latency = HistogramMetricFamily("symbiosis_request_seconds", text, labels=["route"])
        for route, histogram in http.get("request_seconds", {}).items():
            latency.add_metric([route], *_buckets(histogram))
        yield latency
        texts = {
            "time_to_first_token_seconds": "Time to first token.",
            "inter_token_seconds": "Time between two tokens of a sequence.",
        }
        for name, text in texts.items():
            family = HistogramMetricFamily(f"symbiosis_{name}", text)
            if name in http:
                family.add_metric([], *_buckets(http[name]))
            yield family

    def _tenants(self) -> Iterator[Metric]:
        tenants: Mapping[str, Mapping[str, Any]] = self._statistics.get("tenants", {})
        tokens = CounterMetricFamily("symbiosis_tokens", "Tokens of HTTP requests.", labels=["kind", "tenant"])
        for tenant, row in tenants.items():
            tokens.add_metric(["prompt", tenant], row["prompt_tokens"])
            tokens.add_metric(["generation", tenant], row["generated_tokens"])
        yield tokens
        for field, (name, text) in _TENANT_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["tenant"])
            for tenant, row in tenants.items():
                counter.add_metric([tenant], row[field])
            yield counter

    def _split(self) -> Iterator[Metric]:
        for field, (name, text, is_total) in _SPLIT.items():
            family = CounterMetricFamily if is_total else GaugeMetricFamily
            yield family(name, text, value=self._statistics.get(field, 0))

    def _training(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("symbiosis_jobs", "Fine-tuning jobs by state.", labels=["state"])
        for state, count in self._statistics.get("jobs", {}).items():
            jobs.add_metric([state], count)
        yield jobs
        passes = (self._statistics.get("training") or {}).get("passes", {})
        for field, (name, text) in _TRAINING.items():
            yield CounterMetricFamily(name, text, value=passes.get(field, 0))

    def _memory(self) -> Metric:
        memory = GaugeMetricFamily("symbiosis_memory_bytes", "Memory by device and owner.", labels=["device", "owner"])
        for device, owners in self._statistics.get("memory", {}).items():
            for owner, size in owners.items():
                if owner != "total":  # the sum of the others
                    memory.add_metric([device, owner], size)
        return memory


def _buckets(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by bound, and the sum."""
    bounds = [*(str(float(bound)) for bound in histogram["bounds"]), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram["counts"]), strict=True)), histogram["sum"]


def render(statistics: Statistics | None) -> bytes:
    """None: the engine is lost."""
    registry = CollectorRegistry()
    registry.register(_Families(statistics))
    return generate_latest(registry)
