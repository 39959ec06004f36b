"""Which way a call runs over the shards.

*tensor*: every shard computes its part of the layer, rows travel. *parameters*: the shard of the tenant gathers the whole
weight, which travels, and computes alone. Few rows are cheaper to move than a weight, many are not.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum

from symbiosis.common.bounded_dict import evict_oldest
from symbiosis.common.cost_model import CostModel

_CLEAR = 2.0  # estimates that differ by more are believed
_TRIALS = 2  # of each way where estimates are close
_FADE = 0.8
_MAX_BUCKETS = 4096


class Way(StrEnum):
    """How the shards compute a call."""

    TENSOR = "tensor"
    PARAMETERS = "parameters"


class WayChooser:
    """Chooses by measured times: a line over rows for each way, and where the lines are close the times of trials of each.

    Used by one thread. Both ways give the same result.
    """

    def __init__(self, fixed: Way | None = None) -> None:
        self._fixed, self._costs = fixed, CostModel()
        self._trials: dict[tuple[Hashable, int], dict[Way, tuple[int, float]]] = {}

    def choose(self, key: Hashable, rows: int) -> Way:
        if self._fixed is not None:
            return self._fixed
        estimates = {way: self._costs.estimate((key, way), rows) for way in Way}
        best = min(Way, key=lambda way: estimates[way])
        if estimates[best] == 0.0:  # not tried yet
            return best
        if max(estimates.values()) > _CLEAR * estimates[best]:
            return best
        trials = self._trials.get((key, rows.bit_length()), {})
        untried = [way for way in Way if trials.get(way, (0, 0.0))[0] < _TRIALS]
        return untried[0] if untried else min(Way, key=lambda way: trials[way][1])

    def observe(self, key: Hashable, way: Way, rows: int, seconds: float) -> None:
        self._costs.observe((key, way), rows, seconds)
        evict_oldest(self._trials, _MAX_BUCKETS)
        trials = self._trials.setdefault((key, rows.bit_length()), {})
        count, mean = trials.get(way, (0, 0.0))
        # the first run of a size allocates: the second replaces it
        trials[way] = count + 1, seconds if count < _TRIALS else _FADE * mean + (1 - _FADE) * seconds
