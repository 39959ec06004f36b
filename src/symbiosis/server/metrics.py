"""Prometheus metrics: requests and tokens are counted here, the engine's gauges come from its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from symbiosis.jobs.states import JobState

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
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


class Metrics:
    """One per server, with its own registry: nothing is global."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self._registry}
        text = "Requests by route and status; 499: the client disconnected."
        self._requests = Counter("symbiosis_requests", text, ["route", "status"], **options)
        self._tokens = Counter("symbiosis_tokens", "Tokens processed.", ["kind", "tenant"], **options)
        text = "Time to first token."
        self._first_token = Histogram("symbiosis_time_to_first_token_seconds", text, buckets=_FIRST_TOKEN_S, **options)
        text = "Time between two tokens of a sequence."
        self._inter_token = Histogram("symbiosis_inter_token_seconds", text, buckets=_INTER_TOKEN_S, **options)
        text = "Latency of a request; of a stream, until it begins."
        self._request = Histogram("symbiosis_request_seconds", text, ["route"], buckets=_REQUEST_S, **options)
        self._jobs = Gauge("symbiosis_jobs", "Fine-tuning jobs by state.", ["state"], **options)
        self._steps = Counter("symbiosis_training_steps", "Optimizer steps of fine-tuning jobs.", ["tenant"], **options)
        self._trained = Counter("symbiosis_trained_tokens", "Tokens that jobs were trained on.", ["tenant"], **options)
        self._up = Gauge("symbiosis_engine_up", "Whether the engine is reachable.", **options)
        self._engine = {key: Gauge(name, text, **options) for key, (name, text) in _ENGINE.items()}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._request.labels(route).observe(seconds)

    def count_prompt(self, tenant: str, tokens: int) -> None:
        self._tokens.labels("prompt", tenant).inc(tokens)

    def count_token(self, tenant: str) -> None:
        self._tokens.labels("generation", tenant).inc()

    def count_steps(self, tenant: str, steps: int, tokens: int) -> None:
        self._steps.labels(tenant).inc(steps)
        self._trained.labels(tenant).inc(tokens)

    def time_first(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def time_next(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def render(self, stats: dict[str, Any] | None, jobs: Mapping[JobState, int]) -> bytes:
        """`stats` are the engine's, None if it is lost; `jobs` are counts by state."""
        for state, count in jobs.items():
            self._jobs.labels(state.value).set(count)
        self._up.set(stats is not None)
        for key, gauge in self._engine.items():
            group, _, name = key.rpartition(".")
            gauge.set(0 if stats is None else (stats[group] if group else stats)[name])
        return generate_latest(self._registry)
