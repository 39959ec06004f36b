"""Replica sets: on which engines an adapter may be. Bounded by its demand, grown when hot, shrunk without storms.

A set grows by one engine when none of its engines can take a request and the adapter has enough requests for one more. At its
bound, a new engine replaces the one that was used longest ago. A set shrinks by one engine at a time, and not before
`shrink_after_s` without a request there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from symbiosis.cluster.policies.cluster_state import members


@dataclass(slots=True, eq=False)
class ReplicaSet:
    """The engines of one adapter."""

    adapter: str
    mask: int = 0
    running: int = 0
    """Its requests on engines."""
    last_used: dict[int, float] = field(default_factory=dict)
    """By engine number: time of the last placement there, the longest ago first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """Bounds of replica sets."""

    requests_per_replica: int = 4
    """Running requests of an adapter that allow one more replica."""
    hot_share: float = 0.25
    """An adapter is hot with that many of its requests on each of its engines, and with this share of what engines run."""
    spare: int = 1
    """Replicas beyond that, so that an adapter with requests may be on two engines."""
    shrink_after_s: float = 120.0
    """A replica without a placement for this long leaves the set."""
    max_shrinks: int = 2
    """Most replicas that leave all sets together in one second: no storms of evictions and loads."""


class ReplicaSets:
    """The replica sets of all adapters."""

    def __init__(self, config: ReplicaConfig, slots: int) -> None:
        """An engine is in at most `slots` sets, as far as there are others."""
        self.config, self.slots = config, slots
        self.full = 0
        """Engines in as many sets."""
        self.sets: dict[str, ReplicaSet] = {}
        self._on_engine: dict[int, set[str]] = {}
        self._aging: deque[tuple[float, str, int]] = deque()  # placements that opened or renewed a replica, by time
        self._last_shrink = 0.0

    def get(self, adapter: str) -> ReplicaSet:
        found = self.sets.get(adapter)
        if found is None:
            found = self.sets[adapter] = ReplicaSet(adapter)
        return found

    def bound(self, replicas: ReplicaSet) -> int:
        """Most engines of an adapter with so many running requests."""
        return 1 + self.config.spare + replicas.running // self.config.requests_per_replica

    def is_hot(self, replicas: ReplicaSet, per_engine: float) -> bool:
        """Whether its engines have enough of its requests for one more, where engines run `per_engine` requests on average."""
        enough = max(self.config.requests_per_replica, self.config.hot_share * per_engine)
        return replicas.running >= enough * len(replicas.last_used) > 0

    def has_spare(self, replicas: ReplicaSet) -> bool:
        return len(replicas.last_used) > self.config.spare

    def place(self, replicas: ReplicaSet, number: int, now: float) -> None:
        """A request of the adapter goes to an engine, which joins the set. Beyond the bound, another one leaves it."""
        replicas.running += 1
        if number not in replicas.last_used:
            replicas.mask |= 1 << number
            on_engine = self._on_engine.setdefault(number, set())
            on_engine.add(replicas.adapter)
            if len(on_engine) >= self.slots:
                self.full |= 1 << number
            self._aging.append((now, replicas.adapter, number))
        replicas.last_used.pop(number, None)
        replicas.last_used[number] = now
        if len(replicas.last_used) > self.bound(replicas):
            self._leave(replicas, next(iter(replicas.last_used)))

    def finish(self, adapter: str) -> None:
        """A request of the adapter has left its engine."""
        self.sets[adapter].running -= 1

    def drop_engine(self, number: int) -> None:
        """The engine has left, or will soon."""
        for adapter in self._on_engine.pop(number, ()):
            self._discard(self.sets[adapter], number)
        self.full &= ~(1 << number)

    def shrink(self, now: float) -> list[tuple[str, int]]:
        """Replicas that leave their sets now. Requests there continue; the adapter's memory is free for others."""
        left, dropped = int((now - self._last_shrink) * self.config.max_shrinks), []
        if left <= 0:
            return []
        self._last_shrink = now
        while self._aging and left > 0 and self._aging[0][0] + self.config.shrink_after_s <= now:
            _, adapter, number = self._aging.popleft()
            replicas = self.sets.get(adapter)
            if replicas is None or number not in replicas.last_used:
                continue
            used = replicas.last_used[number]
            if used + self.config.shrink_after_s > now:
                self._aging.append((now, adapter, number))  # looked at again after as long
                continue
            self._leave(replicas, number)
            dropped.append((adapter, number))
            left -= 1
        return dropped

    def check_integrity(self) -> None:
        """Assert that all state is consistent. Called by tests."""
        for replicas in self.sets.values():
            assert set(members(replicas.mask)) == set(replicas.last_used)
            assert all(replicas.adapter in self._on_engine[number] for number in replicas.last_used)
        assert set(members(self.full)) == {number for number, held in self._on_engine.items() if len(held) >= self.slots}
        assert sum(map(len, self._on_engine.values())) == sum(len(each.last_used) for each in self.sets.values())

    def _leave(self, replicas: ReplicaSet, number: int) -> None:
        held = self._on_engine[number]
        held.discard(replicas.adapter)
        if len(held) < self.slots:
            self.full &= ~(1 << number)
        self._discard(replicas, number)

    def _discard(self, replicas: ReplicaSet, number: int) -> None:
        replicas.mask &= ~(1 << number)
        del replicas.last_used[number]
        if not replicas.mask and not replicas.running:
            del self.sets[replicas.adapter]
