"""What is counted, for Prometheus. Requests and tokens are counted here; the engine's own figures are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FIRST_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_ENGINE = {
    "running": ("symbiosis_requests_running", "Answers that have pages."),
    "waiting": ("symbiosis_requests_waiting", "Answers in the queue, also those that had to make room."),
    "blocks": ("symbiosis_pages", "Pages of the cache."),
    "blocks_free": ("symbiosis_pages_free", "Pages that could be given to somebody."),
    "blocks_cached": ("symbiosis_pages_cached", "Pages kept because their beginnings may come again."),
    "adapters_resident": ("symbiosis_adapters_resident", "Adapters that have memory."),
    "adapters_loading": ("symbiosis_adapters_loading", "Adapters being read."),
    "adapter_loads": ("symbiosis_adapter_loads", "Adapters loaded so far."),
    "adapter_load_s": ("symbiosis_adapter_load_seconds", "Seconds spent loading them."),
    "adapter_cache.device": ("symbiosis_adapters_on_device", "Adapters that can be computed with now."),
    "adapter_cache.device_bytes": ("symbiosis_adapter_device_bytes", "Their bytes there."),
    "adapter_cache.host": ("symbiosis_adapters_on_host", "Adapters ready to be copied to a GPU."),
    "adapter_cache.loading": ("symbiosis_adapters_coming", "Adapters on their way to the device."),
    "adapter_cache.loads": ("symbiosis_adapter_arrivals", "How often one was brought to the device."),
    "adapter_cache.load_s": ("symbiosis_adapter_arrival_seconds", "Seconds from being sent for to being there, all together."),
    "adapter_cache.device_evictions": ("symbiosis_adapter_evictions", "How often one left the device for another."),
    "steps": ("symbiosis_passes", "Passes through the model so far."),
}


class Metrics:
    """One for a server: nothing global, so tests can have several."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        mine: dict[str, Any] = {"registry": self._registry}
        requests = "Requests by route and status; 499: the client left."
        self._requests = Counter("symbiosis_requests", requests, ["route", "status"], **mine)
        self._tokens = Counter("symbiosis_tokens", "Tokens computed.", ["kind", "tenant"], **mine)
        first, following = "From a request to its first token.", "Between two tokens of an answer."
        self._first = Histogram("symbiosis_time_to_first_token_seconds", first, buckets=_FIRST_S, **mine)
        self._next = Histogram("symbiosis_inter_token_seconds", following, buckets=_NEXT_S, **mine)
        whole = "From a request to its end; of a stream, to its beginning."
        self._whole = Histogram("symbiosis_request_seconds", whole, ["route"], buckets=_WHOLE_S, **mine)
        self._jobs = Gauge("symbiosis_jobs", "Fine-tuning jobs by state.", ["state"], **mine)
        self._steps = Counter("symbiosis_training_steps", "Steps of fine-tuning jobs.", ["tenant"], **mine)
        self._trained = Counter("symbiosis_trained_tokens", "Tokens that jobs were trained on.", ["tenant"], **mine)
        self._up = Gauge("symbiosis_engine_up", "Whether the engine answers.", registry=self._registry)
        self._engine = {key: Gauge(name, text, registry=self._registry) for key, (name, text) in _ENGINE.items()}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._whole.labels(route).observe(seconds)

    def count_prompt(self, tenant: str, tokens: int) -> None:
        self._tokens.labels("prompt", tenant).inc(tokens)

    def count_token(self, tenant: str) -> None:
        self._tokens.labels("generation", tenant).inc()

    def count_steps(self, tenant: str, steps: int, tokens: int) -> None:
        self._steps.labels(tenant).inc(steps)
        self._trained.labels(tenant).inc(tokens)

    def time_first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def time_next(self, seconds: float) -> None:
        self._next.observe(seconds)

    def written(self, figures: dict[str, Any] | None, jobs: Mapping[str, int] | None = None) -> bytes:
        """All of it; `figures` are the engine's, None if it is gone; `jobs` are those by state."""
        for state, count in (jobs or {}).items():
            self._jobs.labels(state).set(count)
        self._up.set(figures is not None)
        for key, gauge in self._engine.items():
            group, _, name = key.rpartition(".")
            gauge.set(0 if figures is None else (figures[group] if group else figures)[name])
        return generate_latest(self._registry)
