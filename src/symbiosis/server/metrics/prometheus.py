"""Prometheus text of the metrics: counts of the HTTP processes, statistics of the engine, jobs by state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from symbiosis.jobs.states import JobState
from symbiosis.server.metrics.counts import METRICS, Metric

_ENGINE = {
    "running": ("symbiosis_requests_running", "Sequences that hold KV cache blocks."),
    "waiting": ("symbiosis_requests_waiting", "Sequences in the queue, preempted ones included."),
    "blocks": ("symbiosis_kv_cache_blocks", "Blocks of the KV cache."),
    "blocks_free": ("symbiosis_kv_cache_blocks_free", "Blocks that can be allocated."),
    "blocks_cached": ("symbiosis_kv_cache_blocks_cached", "Blocks kept for prefix caching."),
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
}


class _Snapshot(Collector):
    def __init__(self, sums: Iterable[Any], stats: Mapping[str, Any] | None, jobs: Mapping[JobState, int]) -> None:
        self._sums, self._stats, self._jobs = sums, stats, jobs

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        by_name: dict[str, list[tuple[list[str], list[float]]]] = {name: [] for name in METRICS}
        for name, labels, values in self._sums:
            by_name[name].append((labels, values))
        for name, entries in by_name.items():
            yield _family(name, METRICS[name], entries)
        jobs = GaugeMetricFamily("symbiosis_jobs", "Fine-tuning jobs by state.", labels=["state"])
        for state, count in self._jobs.items():
            jobs.add_metric([state.value], count)
        yield jobs
        yield GaugeMetricFamily("symbiosis_engine_up", "Whether the engine is reachable.", value=int(self._stats is not None))
        for key, (name, text) in _ENGINE.items():
            group, _, field = key.rpartition(".")
            stats = self._stats
            value = 0 if stats is None else (stats[group] if group else stats)[field]
            yield GaugeMetricFamily(name, text, value=value)


def _family(
    name: str, metric: Metric, entries: Iterable[tuple[list[str], list[float]]]
) -> CounterMetricFamily | HistogramMetricFamily:
    if not metric.buckets:
        counter = CounterMetricFamily(name, metric.text, labels=metric.labels)
        for labels, (value,) in entries:
            counter.add_metric(labels, value)
        return counter
    histogram = HistogramMetricFamily(name, metric.text, labels=metric.labels)
    bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
    for labels, (*counts, total) in entries or ([([], [0.0] * (len(bounds) + 1))] if not metric.labels else []):
        buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
        histogram.add_metric(labels, buckets, total)
    return histogram


def render(sums: Iterable[Any], stats: Mapping[str, Any] | None, jobs: Mapping[JobState, int]) -> bytes:
    """`sums` are those of `MetricSums`; `stats` are the engine's, None if it is lost; `jobs` are counts by state."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(sums, stats, jobs))
    return generate_latest(registry)
