"""The last ten minutes of a few series, one sample a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

INTERVAL_S = 1.0
_SAMPLES = 600
RATES = ("generated_tokens", "prompt_tokens", "trained_tokens", "split_tokens")
"""Totals whose series is the rate a second."""
GAUGES = ("running", "waiting", "kv_blocks_used", "memory_bytes")


class History:
    """A ring of samples: the memory is bounded."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        self._rows: deque[tuple[float, ...]] = deque(maxlen=samples)
        self._last_s: float | None = None
        self._last_totals: Mapping[str, float] = {}

    def record(self, now: float, totals: Mapping[str, float], gauges: Mapping[str, float]) -> None:
        """`now` is the uptime in seconds. A total or gauge that is missing counts as 0; the first call has no rates."""
        if self._last_s is not None and now > self._last_s:
            seconds, last = now - self._last_s, self._last_totals
            rates = (max(0.0, totals.get(name, 0) - last.get(name, 0)) / seconds for name in RATES)
            self._rows.append((now, *rates, *(gauges.get(name, 0) for name in GAUGES)))
        self._last_s, self._last_totals = now, dict(totals)

    def to_json(self) -> dict[str, Any]:
        """A list of numbers by series, oldest first; `uptime_s` are the times of the samples."""
        columns = list(zip(*list(self._rows), strict=True)) or [()] * (1 + len(RATES) + len(GAUGES))
        names = ("uptime_s", *(f"{name}_per_s" for name in RATES), *GAUGES)
        return {name: [round(value, 2) for value in column] for name, column in zip(names, columns, strict=True)}
