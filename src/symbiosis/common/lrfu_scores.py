"""LRFU: a score for eviction from recency and frequency, the sum of past uses, each halved with every half-life since.

Scores are logarithms, so that they need no update while time passes: the logarithm of a sum that halves with each half-life
falls by one for all keys alike. A score only compares.
"""

from __future__ import annotations

import math


class LrfuScores:
    """Scores by key. Time is counted in uses, so that the order does not depend on how fast they come."""

    def __init__(self, half_life: float = 4.0) -> None:
        """`half_life` in uses for each cached key: a small one is nearer to LRU, a large one to LFU."""
        self._half_life = half_life
        self._now = 0.0  # in half-lives
        self._scores: dict[str, float] = {}

    def use(self, key: str, cached: int) -> None:
        """Count a use, while so many keys are cached."""
        self._now = now = self._now + 1 / (self._half_life * max(1, cached))
        score = self._scores.get(key)
        self._scores[key] = now if score is None else max(score, now) + math.log2(1 + 2.0 ** -abs(score - now))

    def get(self, key: str) -> float:
        return self._scores.get(key, -math.inf)

    def discard(self, key: str) -> None:
        self._scores.pop(key, None)
