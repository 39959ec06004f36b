"""Counts of an HTTP process, cheap to add to, and their sums over all HTTP processes.

Each process adds to `Metrics` and sends what was added to the engine process several times a second; `MetricSums` there is
the one owner. `prometheus` renders the sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, or a histogram if it has buckets."""

    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = {
    "symbiosis_requests": Metric("Requests by route and status; 499: the client disconnected.", ("route", "status")),
    "symbiosis_tokens": Metric("Tokens processed.", ("kind", "tenant")),
    "symbiosis_time_to_first_token_seconds": Metric("Time to first token.", (), _FIRST_TOKEN_S),
    "symbiosis_inter_token_seconds": Metric("Time between two tokens of a sequence.", (), _INTER_TOKEN_S),
    "symbiosis_request_seconds": Metric("Latency of a request; of a stream, until it begins.", ("route",), _REQUEST_S),
    "symbiosis_training_steps": Metric("Optimizer steps of fine-tuning jobs.", ("tenant",)),
    "symbiosis_trained_tokens": Metric("Tokens that jobs were trained on.", ("tenant",)),
}

Key = tuple[str, tuple[str, ...]]
"""A metric's name and its label values."""


class Metrics:
    """What was counted since the last `take`. One per HTTP process."""

    def __init__(self) -> None:
        self._counters: dict[Key, float] = {}
        self._histograms: dict[Key, list[float]] = {}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._add("symbiosis_requests", 1, route, str(status))
        self._observe("symbiosis_request_seconds", seconds, route)

    def count_prompt(self, tenant: str, tokens: int) -> None:
        self._add("symbiosis_tokens", tokens, "prompt", tenant)

    def count_tokens(self, tenant: str, tokens: int) -> None:
        self._add("symbiosis_tokens", tokens, "generation", tenant)

    def count_steps(self, tenant: str, steps: int, tokens: int) -> None:
        self._add("symbiosis_training_steps", steps, tenant)
        self._add("symbiosis_trained_tokens", tokens, tenant)

    def time_first(self, seconds: float) -> None:
        self._observe("symbiosis_time_to_first_token_seconds", seconds)

    def time_next(self, seconds: float) -> None:
        self._observe("symbiosis_inter_token_seconds", seconds)

    def _add(self, name: str, value: float, *labels: str) -> None:
        key = (name, labels)
        self._counters[key] = self._counters.get(key, 0) + value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        buckets = METRICS[name].buckets
        counts = self._histograms.get((name, labels))
        if counts is None:  # one for each bucket, one for what is above all, and the sum
            counts = self._histograms[name, labels] = [0.0] * (len(buckets) + 2)
        counts[bisect_left(buckets, value)] += 1
        counts[-1] += value

    def take(self) -> list[Any]:
        """What was counted since the last call, as JSON: name, label values, and numbers."""
        counted = [[*key, [value]] for key, value in self._counters.items()]
        counted += [[*key, counts] for key, counts in self._histograms.items()]
        self._counters, self._histograms = {}, {}
        return counted


class MetricSums:
    """Sums over all HTTP processes, those that have ended too."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = {}

    def add(self, counted: Iterable[Any]) -> None:
        """What `Metrics.take` returned. Entries of another form are dropped."""
        for name, labels, values in counted:
            metric = METRICS.get(name)
            if metric is None or len(labels) != len(metric.labels):
                continue
            sums = self._sums.setdefault((name, tuple(labels)), [0.0] * len(values))
            for index, value in enumerate(values[: len(sums)]):
                sums[index] += value

    def to_json(self) -> list[Any]:
        return [[name, list(labels), values] for (name, labels), values in self._sums.items()]
