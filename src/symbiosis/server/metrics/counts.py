"""Counts of an HTTP process, cheap to add to, and their sums over all HTTP processes.

Each process adds to `Metrics` and sends what was added to the engine process several times a second; `MetricSums` there is
the one owner, and a part of its statistics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


TENANT_COUNTERS = ("requests", "prompt_tokens", "generated_tokens", "training_steps", "trained_tokens")
"""Counters whose one label is the tenant."""
_LABELS = {"responses": 2, "request_seconds": 1, "time_to_first_token_seconds": 0, "inter_token_seconds": 0}
_LABELS |= dict.fromkeys(TENANT_COUNTERS, 1)
_BOUNDS = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_seconds": _INTER_TOKEN_S,
    "request_seconds": _REQUEST_S,
}
"""Upper bounds of the buckets of histograms."""

Key = tuple[str, tuple[str, ...]]
"""A counter's or histogram's name and its label values."""


class Metrics:
    """What was counted since the last `take`. One per HTTP process."""

    def __init__(self) -> None:
        self._counters: dict[Key, float] = {}
        self._histograms: dict[Key, list[float]] = {}

    def count_request(self, route: str, status: int, seconds: float, tenant: str | None = None) -> None:
        """`tenant` None: a route that needs no key."""
        self._add("responses", 1, route, str(status))
        self._observe("request_seconds", seconds, route)
        if tenant is not None:
            self._add("requests", 1, tenant)

    def count_prompt(self, tenant: str, tokens: int) -> None:
        self._add("prompt_tokens", tokens, tenant)

    def count_tokens(self, tenant: str, tokens: int) -> None:
        self._add("generated_tokens", tokens, tenant)

    def count_steps(self, tenant: str, steps: int, tokens: int) -> None:
        self._add("training_steps", steps, tenant)
        self._add("trained_tokens", tokens, tenant)

    def time_first(self, seconds: float) -> None:
        self._observe("time_to_first_token_seconds", seconds)

    def time_next(self, seconds: float) -> None:
        self._observe("inter_token_seconds", seconds)

    def _add(self, name: str, value: float, *labels: str) -> None:
        key = (name, labels)
        self._counters[key] = self._counters.get(key, 0) + value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        bounds = _BOUNDS[name]
        counts = self._histograms.get((name, labels))
        if counts is None:  # one for each bucket, one for what is above all, and the sum
            counts = self._histograms[name, labels] = [0.0] * (len(bounds) + 2)
        counts[bisect_left(bounds, value)] += 1
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
            if _LABELS.get(name) != len(labels):
                continue
            sums = self._sums.setdefault((name, tuple(labels)), [0.0] * _length(name))
            for index, value in enumerate(values[: len(sums)]):
                sums[index] += value

    def http(self) -> dict[str, Any]:
        """Requests by route and status (499: the client disconnected), and histograms of latencies."""
        requests = [
            {"route": route, "status": status, "count": int(self._sums["responses", (route, status)][0])}
            for route, status in self._labels("responses")
        ]
        seconds = {route: self._histogram("request_seconds", route) for (route,) in self._labels("request_seconds")}
        whole = ("time_to_first_token_seconds", "inter_token_seconds")
        return {"requests": requests, "request_seconds": seconds, **{name: self._histogram(name) for name in whole}}

    def tenants(self) -> dict[str, dict[str, int]]:
        """The counters of each tenant."""
        found: dict[str, dict[str, int]] = {}
        for name in TENANT_COUNTERS:
            for (tenant,) in self._labels(name):
                found.setdefault(tenant, dict.fromkeys(TENANT_COUNTERS, 0))[name] = int(self._sums[name, (tenant,)][0])
        return found

    def _labels(self, name: str) -> list[tuple[str, ...]]:
        return [labels for found, labels in self._sums if found == name]

    def _histogram(self, name: str, *labels: str) -> dict[str, Any]:
        """`counts` has one number for each bound, and one for what is above all."""
        *counts, total = self._sums.get((name, labels)) or [0.0] * _length(name)
        return {"bounds": list(_BOUNDS[name]), "counts": [int(count) for count in counts], "sum": total}


def _length(name: str) -> int:
    """Numbers of a counter or histogram."""
    return len(_BOUNDS[name]) + 2 if name in _BOUNDS else 1
