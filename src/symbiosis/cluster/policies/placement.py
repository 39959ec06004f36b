"""Placement: the engine of a new request, among those it may go to.

`candidates` and `levels` are masks: engines that may take the request, and load levels at which it fits.
"""

from __future__ import annotations

import random
from typing import Protocol

from symbiosis.cluster.policies.cluster_state import ClusterState

_FEW = 8


class PlacementRule(Protocol):
    """Chooses one of several engines."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        """The number of an engine, or -1 if none fits."""


def _fullest(state: ClusterState, candidates: int, levels: int) -> int:
    """The same one by one: faster than by level for a few engines."""
    best, chosen = -1, -1
    while candidates:
        number = candidates.bit_length() - 1
        candidates ^= 1 << number
        level = state.engines[number].level
        if level > best and levels >> level & 1:
            best, chosen = level, number
    return chosen


class LargestWorkingSet:
    """Punica's rule: the fullest engine that still fits, ties to the highest number. Other engines become idle."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        if candidates.bit_count() <= _FEW:
            return _fullest(state, candidates, levels)
        left, by_level = state.levels & levels, state.by_level
        while left:
            level = left.bit_length() - 1
            found = by_level[level] & candidates
            if found:
                return found.bit_length() - 1
            left ^= 1 << level
        return -1


class LeastLoaded:
    """The emptiest engine, ties to the lowest number."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        left, by_level = state.levels & levels, state.by_level
        while left:
            lowest = left & -left
            found = by_level[lowest.bit_length() - 1] & candidates
            if found:
                return (found & -found).bit_length() - 1
            left ^= lowest
        return -1


class PowerOfTwo:
    """The less loaded of two random engines."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        chosen = -1
        for number in self._draw(candidates):
            engine = state.engines[number]
            if levels >> engine.level & 1 and (chosen < 0 or engine.level < state.engines[chosen].level):
                chosen = number
        return chosen if chosen >= 0 else LeastLoaded().choose(state, candidates, levels)

    def _draw(self, candidates: int) -> list[int]:
        """Two random members: the first at or after a random bit, around the end."""
        found = []
        for _ in range(2):
            if not candidates:
                break
            start = self._random.randrange(candidates.bit_length())
            tail = candidates >> start << start or candidates
            number = (tail & -tail).bit_length() - 1
            candidates ^= 1 << number
            found.append(number)
        return found


PLACEMENTS = ("least-loaded", "largest-working-set", "power-of-two")
"""Names of rules. The first is the default."""


def make_placement(name: str, seed: int = 0) -> PlacementRule:
    """A rule of `PLACEMENTS` by its name."""
    match name:
        case "largest-working-set":
            return LargestWorkingSet()
        case "least-loaded":
            return LeastLoaded()
        case "power-of-two":
            return PowerOfTwo(seed)
    raise ValueError(f"unknown placement {name!r}")
