"""Controls which share of a GPU training has while the engine serves, from the durations of the engine's steps.

The controller bounds the tail latency, not the median. It raises the share only after several comparisons in a row that
allow more, and doubles that number each time a larger share proved too large: a new share means new CUDA graphs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_FIRST_SHARE = 0.5  # of the multiprocessors
_PARTS = 8  # shares are multiples of 1/8
_TOLERANCE = 1.015  # times the allowed slowdown
_TAIL_QUANTILE = 0.98
_MAX_DECODE = 2.0  # times the median: longer steps include a prefill
_MIN_PATIENCE, _MAX_PATIENCE = 4, 64  # comparisons in a row that allow more


class ShareController:
    def __init__(self, max_slowdown: float) -> None:
        """`max_slowdown`: allowed step time with training, as a multiple of the step time without."""
        self.share, self._max_slowdown = _FIRST_SHARE, max_slowdown
        self._allowed_more, self._patience = 0, _MIN_PATIENCE
        self._raised_from: float | None = None

    def update(self, colocated_s: Sequence[float], alone_s: Sequence[float]) -> bool:
        """Adapt the share to step durations with and without training. Returns whether the share has changed."""
        share = fit_share(self.share, tail_latency(colocated_s) / statistics.median(alone_s), self._max_slowdown)
        if share > self.share:
            self._allowed_more += 1
            if self._allowed_more < self._patience:
                self._raised_from = None
                return False
        elif share < self.share and self._raised_from is not None:
            share, self._patience = self._raised_from, min(2 * self._patience, _MAX_PATIENCE)
        before, self.share, self._allowed_more = self.share, share, 0
        self._raised_from = before if share > before else None
        return share != before


def tail_latency(step_s: Sequence[float]) -> float:
    """The 98th percentile of the durations of decode steps."""
    decode_s = sorted(each for each in step_s if each <= _MAX_DECODE * statistics.median(step_s))
    return decode_s[min(len(decode_s) - 1, int(_TAIL_QUANTILE * len(decode_s)))]


def fit_share(share: float, slowdown: float, max_slowdown: float) -> float:
    """The share that slows steps by `max_slowdown`, if `share` slows them by `slowdown`.

    The added time is assumed proportional to the share. The share changes by at most one half at a time.
    """
    now, target = _PARTS * share, _PARTS * share * (_TOLERANCE * max_slowdown - 1) / max(slowdown - 1, 0.01)
    parts = math.floor(max(0.5 * now, min(max(1.5 * now, now + 1), target)) + 1e-6)
    return max(1, min(_PARTS - 1, parts)) / _PARTS
