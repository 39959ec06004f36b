"""Which way a call runs over the shards.

*tensor*: every shard computes its part of the layer, rows travel. *parameters*: the shard of the tenant gathers the whole
weight, which travels, and computes alone. Few rows are cheaper to move than a weight, many are not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from enum import StrEnum

from symbiosis.common.bounded_dict import evict_oldest

_TRIALS = ((1.3, 8), (4.0, 4), (math.inf, 3))
"""Runs of each way before one is chosen, by the ratio of their seconds: a close pair costs little to compare."""
_RECENT = 8
"""Runs that count. Their lower quartile is the time of a way: other work on the machine delays some, and hastens none."""
_RETRY_AFTER, _RETRY_GROWTH = 8, 4
"""The slower way runs again after so many runs of the faster one, then after so many times as many: it costs ever less."""
_MAX_KEYS = 1024


class Way(StrEnum):
    """How the shards compute a call."""

    TENSOR = "tensor"
    PARAMETERS = "parameters"


class _Times:
    """Runs of one way for one size of call."""

    def __init__(self) -> None:
        self.runs = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        self.runs += 1
        self._recent.append(seconds)

    @property
    def seconds(self) -> float:
        return sorted(self._recent)[(len(self._recent) - 1) // 4]


class WayChooser:
    """Chooses by measured times, for each size of call. Both ways give the same result. Used by one thread.

    A way is tried for a size unless three sizes with fewer rows took it longer already than the other way takes for this size.
    """

    def __init__(self, fixed: Way | None = None) -> None:
        self._fixed = fixed
        self._times: dict[Hashable, dict[Way, dict[int, _Times]]] = {}  # by key, way and size

    def choose(self, key: Hashable, rows: int) -> Way:
        """The way of the next call: the best one, or one that has to be tried."""
        best = self.best(key, rows)
        times, size = self._times.get(key), _size(rows)
        if self._fixed is not None or times is None:
            return best
        known, least = _known(times, size), _least_of_ways(times, size)
        untried = [way for way in Way if way not in known and (not known or least[way] < known[best].seconds)]
        if untried:
            return min(untried, key=lambda way: least[way])
        for way, found in known.items():
            ratio = max(each.seconds for each in known.values()) / max(known[best].seconds, 1e-9)
            trials = next(runs for most, runs in _TRIALS if ratio < most)
            if found.runs < trials and len(known) > 1:
                return way
            extra = max(0, found.runs - trials)
            if way is not best and known[best].runs >= _RETRY_AFTER * _RETRY_GROWTH**extra:
                return way
        return best

    def best(self, key: Hashable, rows: int) -> Way:
        """The faster way, as far as is known."""
        if self._fixed is not None:
            return self._fixed
        times, size = self._times.get(key), _size(rows)
        if times is None:
            return Way.TENSOR
        known, least = _known(times, size), _least_of_ways(times, size)
        return min(known or Way, key=lambda way: known[way].seconds if way in known else least[way])

    def observe(self, key: Hashable, way: Way, rows: int, seconds: float) -> None:
        if key not in self._times:
            evict_oldest(self._times, _MAX_KEYS)
            self._times[key] = {way: {} for way in Way}
        self._times[key][way].setdefault(_size(rows), _Times()).add(seconds)


def _known(times: Mapping[Way, Mapping[int, _Times]], size: int) -> dict[Way, _Times]:
    """The ways that have run for this size."""
    return {way: found[size] for way, found in times.items() if size in found}


def _least_of_ways(times: Mapping[Way, Mapping[int, _Times]], size: int) -> dict[Way, float]:
    return {way: _least(times[way], size) for way in Way}


def _least(times: Mapping[int, _Times], size: int) -> float:
    """Seconds that a way takes at least for a size. Two delayed sizes do not count."""
    smaller = sorted(found.seconds for at, found in times.items() if at <= size)
    return smaller[-3] if len(smaller) > 2 else 0.0


def _size(rows: int) -> int:
    """Calls within a factor of 1.4 are of one size."""
    return round(2 * math.log2(rows))
