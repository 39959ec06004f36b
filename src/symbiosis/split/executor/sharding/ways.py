"""Which way a call runs over the shards.

*tensor*: every shard computes its part of the layer, rows travel. *parameters*: the shard of the tenant gathers the whole
weight, which travels, and computes alone. Few rows are cheaper to move than a weight, many are not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from enum import StrEnum

from symbiosis.common.bounded_dict import evict_oldest

_TRIALS = 2  # the first run of a size allocates: the second counts
_FADE = 0.8
_MAX_KEYS = 1024


class Way(StrEnum):
    """How the shards compute a call."""

    TENSOR = "tensor"
    PARAMETERS = "parameters"


class WayChooser:
    """Chooses by measured times, for each size of call. Both ways give the same result. Used by one thread.

    A way is tried for a size unless fewer rows took it longer already than the other way takes for this size.
    """

    def __init__(self, fixed: Way | None = None) -> None:
        self._fixed = fixed
        self._times: dict[Hashable, dict[Way, dict[int, tuple[int, float]]]] = {}  # by key, way and size: runs and seconds

    def choose(self, key: Hashable, rows: int) -> Way:
        if self._fixed is not None:
            return self._fixed
        times, size = self._times.get(key), _size(rows)
        if times is None:
            return Way.TENSOR
        known = {way: found[size][1] for way, found in times.items() if found.get(size, (0, 0.0))[0] >= _TRIALS}
        least = {way: max((seconds for at, (_, seconds) in times[way].items() if at <= size), default=0.0) for way in Way}
        best = min(known or Way, key=lambda way: known.get(way, least[way]))
        untried = [way for way in Way if way not in known and (not known or least[way] < known[best])]
        return min(untried, key=lambda way: least[way]) if untried else best

    def observe(self, key: Hashable, way: Way, rows: int, seconds: float) -> None:
        if key not in self._times:
            evict_oldest(self._times, _MAX_KEYS)
            self._times[key] = {way: {} for way in Way}
        found, size = self._times[key][way], _size(rows)
        runs, mean = found.get(size, (0, 0.0))
        found[size] = runs + 1, seconds if runs < _TRIALS else _FADE * mean + (1 - _FADE) * seconds


def _size(rows: int) -> int:
    """Calls within a factor of 1.4 are of one size."""
    return round(2 * math.log2(rows))
