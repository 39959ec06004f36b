"""Placement: the engine of a new request, among those it may go to.

`candidates` and `levels` are masks: engines that may take the request, and load levels at which it fits, from 0 to some level.
"""

from __future__ import annotations

import random
from typing import Protocol

from symbiosis.cluster.policies.cluster_state import GROUP, ClusterState


class PlacementRule(Protocol):
    """Chooses one of several engines."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        """The number of an engine, or -1 if none fits."""


class LargestWorkingSet:
    """Punica's rule: the fullest engine that still fits, ties to the highest number. Other engines become idle."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        if not candidates:
            return -1
        by_group, by_level = state.by_group, state.by_level
        top = levels.bit_length() - 1
        for group in range(top // GROUP, -1, -1):
            if by_group[group] & candidates:
                for level in range(min(top, GROUP * group + GROUP - 1), GROUP * group - 1, -1):
                    found = by_level[level] & candidates
                    if found:
                        return found.bit_length() - 1
        return -1


class LeastLoaded:
    """The emptiest engine, ties to the lowest number."""

    def choose(self, state: ClusterState, candidates: int, levels: int) -> int:
        if not candidates:
            return -1
        by_level = state.by_level
        top = levels.bit_length() - 1
        for group, engines in enumerate(state.by_group):
            if engines & candidates:
                first = GROUP * group
                for level in range(first, min(top + 1, first + GROUP)):
                    found = by_level[level] & candidates
                    if found:
                        return (found & -found).bit_length() - 1
                if first + GROUP > top:
                    break
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
