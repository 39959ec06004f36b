"""What the policies know of the cluster: its engines, the requests on them, and an index of engines by load.

Events of engines and requests change the state; policies read it. Sets of engines are bit masks over engine numbers, so that
the most or least loaded engine of any set is found with a few operations on integers, however many engines there are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

LEVELS = 128
"""Load levels: an engine at this level is full."""
GROUP = 8
"""Levels of one group: a search looks at groups first."""


class EngineStatus(Enum):
    """Life of an engine in the cluster."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


_READY = EngineStatus.READY  # a global is read faster than a member


@dataclass(slots=True, eq=False)
class ClusterRequest:
    """One request of the cluster: `prompt` tokens in, an unknown number of tokens out."""

    id: int
    tenant: str
    adapter: str
    prompt: int
    arrival: float
    blocks: tuple[int, ...] = ()
    """Hashes of the prompt's full blocks, in order: a prefix of them may be in an engine's KV cache."""
    generated: int = 0
    """Tokens delivered before the last placement: a migrated request prefills them too."""
    epoch: int = 0
    """Number of placements. Events of earlier epochs are void."""
    engine: int = -1
    """Number of the engine it is on; -1 while it waits."""
    cached: int = 0
    """Prompt tokens expected in the engine's KV cache."""
    prefill_s: float = 0.0
    """Expected seconds of its prefill; 0 after its first token."""
    reserved: int = 0
    """KV cache tokens reserved for it."""
    avoided: int = 0
    """Mask of engines without KV cache for it, or that its HTTP process cannot reach: its next placement is on another one,
    if there is one."""

    @property
    def tokens(self) -> int:
        """Tokens to prefill, those in a KV cache included."""
        return self.prompt + self.generated


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine."""

    number: int
    kv_tokens: int
    max_running: int
    status: EngineStatus = EngineStatus.STARTING
    since: float = 0.0
    """Time of the last change of status."""
    requests: dict[int, ClusterRequest] = field(default_factory=dict)
    kv_reserved: int = 0
    pending_prefill_s: float = 0.0
    """Expected seconds of the prefills it has not finished."""
    work_until: float = 0.0
    """Time at which the work it has taken is done, at the utilization that the objective allows."""
    level: int = 0
    bit: int = field(init=False)
    """Its mask: one bit, at its number."""

    def __post_init__(self) -> None:
        self.bit = 1 << self.number

    def load(self) -> float:
        """Share of its capacity in use: of sequences or of the KV cache, whichever is larger."""
        return max(len(self.requests) / self.max_running, self.kv_reserved / self.kv_tokens)


def members(mask: int) -> Iterator[int]:
    """The engine numbers in a mask, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class ClusterState:
    """Engines and requests. All methods take constant time but `check_integrity`."""

    def __init__(self, max_pending_prefill_s: float, max_ahead_s: float = math.inf) -> None:
        """An engine with more pending prefill, or with work for longer than `max_ahead_s`, is closed to new requests."""
        self.max_pending_prefill_s, self.max_ahead_s = max_pending_prefill_s, max_ahead_s
        self.engines: dict[int, EngineState] = {}
        self.by_level = [0] * (LEVELS + 1)
        """Ready engines by load level."""
        self.by_group = [0] * (LEVELS // GROUP + 1)
        """Ready engines by group of levels."""
        self.ready = 0
        """Engines that take requests."""
        self.open = 0
        """Ready engines below both caps."""
        self.num_requests = 0
        self.kv_reserved = 0
        """KV cache tokens reserved on all engines."""
        self._free: list[int] = []
        self._busy = 0  # engines with work for longer than the cap
        self._reopening: list[tuple[float, int]] = []  # a heap of the times at which these may open

    def add_engine(self, *, kv_tokens: int, max_running: int, now: float) -> EngineState:
        """A starting engine, with the lowest free number."""
        number = min(self._free, default=len(self.engines))
        if self._free:
            self._free.remove(number)
        engine = EngineState(number, kv_tokens, max_running, since=now)
        self.engines[number] = engine
        return engine

    def set_status(self, engine: EngineState, status: EngineStatus, now: float) -> None:
        if engine.status is EngineStatus.READY:
            self._unindex(engine)
        engine.status, engine.since = status, now
        if status is EngineStatus.READY:
            self.ready |= engine.bit
            self._index(engine)
        elif status is EngineStatus.GONE:
            assert not engine.requests, "an engine leaves without requests"
            del self.engines[engine.number]
            self._busy &= ~engine.bit
            self._free.append(engine.number)

    def advance(self, now: float) -> None:
        """Open engines whose work has come below the cap since. Called before a placement."""
        heap = self._reopening
        while heap and heap[0][0] <= now:
            number = heapq.heappop(heap)[1]
            engine = self.engines.get(number)
            if engine is None or not self._busy & engine.bit:
                continue
            if engine.work_until - now > self.max_ahead_s:
                heapq.heappush(heap, (engine.work_until - self.max_ahead_s, number))
                continue
            self._busy ^= engine.bit
            self._update_open(engine)

    def place(
        self,
        request: ClusterRequest,
        engine: EngineState,
        *,
        prefill_s: float,
        reserved: int,
        work_s: float = 0.0,
        now: float = 0.0,
    ) -> None:
        """A request goes to an engine. `work_s` is the engine's time for it, at the utilization that the objective allows."""
        assert request.engine < 0, f"{request.id} is on an engine already"
        request.engine, request.epoch = engine.number, request.epoch + 1
        request.prefill_s, request.reserved = prefill_s, reserved
        engine.requests[request.id] = request
        engine.kv_reserved += reserved
        self.kv_reserved += reserved
        engine.pending_prefill_s += prefill_s
        engine.work_until = max(now, engine.work_until) + work_s
        if engine.work_until - now > self.max_ahead_s and not self._busy & engine.bit:
            self._busy |= engine.bit
            heapq.heappush(self._reopening, (engine.work_until - self.max_ahead_s, engine.number))
        self.num_requests += 1
        self._update(engine)

    def finish_prefill(self, request: ClusterRequest) -> None:
        """The first token of a request's placement is there."""
        engine = self.engines[request.engine]
        engine.pending_prefill_s -= request.prefill_s
        request.prefill_s = 0.0
        self._update_open(engine)

    def remove(self, request: ClusterRequest) -> EngineState:
        """A request has left its engine; it may be placed again."""
        engine = self.engines[request.engine]
        del engine.requests[request.id]
        engine.kv_reserved -= request.reserved
        self.kv_reserved -= request.reserved
        engine.pending_prefill_s = engine.pending_prefill_s - request.prefill_s if engine.requests else 0.0
        request.engine, request.prefill_s, request.reserved = -1, 0.0, 0
        self.num_requests -= 1
        self._update(engine)
        return engine

    def reserve(self, request: ClusterRequest, reserved: int) -> None:
        """Correct the KV cache tokens of a running request, after a report of its engine."""
        engine = self.engines[request.engine]
        engine.kv_reserved += reserved - request.reserved
        self.kv_reserved += reserved - request.reserved
        request.reserved = reserved
        self._update(engine)

    def count(self, status: EngineStatus) -> int:
        return sum(engine.status is status for engine in self.engines.values())

    def levels_for(self, reserved: int, kv_tokens: int) -> int:
        """Mask of the load levels at which a request with so many KV cache tokens still fits; an idle engine takes any."""
        needed = -(-reserved * LEVELS // kv_tokens)
        return (1 << max(1, LEVELS - needed + 1)) - 1

    def check_integrity(self) -> None:
        """Assert that all state is consistent. Called by tests."""
        assert self.num_requests == sum(len(engine.requests) for engine in self.engines.values())
        assert self.kv_reserved == sum(engine.kv_reserved for engine in self.engines.values())
        for number, engine in self.engines.items():
            ready = engine.status is EngineStatus.READY
            assert engine.number == number
            assert all(request.engine == number for request in engine.requests.values())
            assert engine.kv_reserved == sum(request.reserved for request in engine.requests.values())
            pending = sum(request.prefill_s for request in engine.requests.values())
            assert abs(engine.pending_prefill_s - pending) < 1e-6
            assert bool(self.ready & engine.bit) == ready
            below = engine.pending_prefill_s < self.max_pending_prefill_s and not self._busy & engine.bit
            assert bool(self.open & engine.bit) == (ready and below)
            found = [level for level, mask in enumerate(self.by_level) if mask & engine.bit]
            assert found == ([self._level(engine)] if ready else [])
        for group, mask in enumerate(self.by_group):
            assert mask == sum(self.by_level[GROUP * group : GROUP * (group + 1)]), "an engine is at one level"

    @staticmethod
    def _level(engine: EngineState) -> int:
        running = len(engine.requests)
        if running >= engine.max_running:
            return LEVELS
        rows = LEVELS * running // engine.max_running
        kv = -(-LEVELS * engine.kv_reserved // engine.kv_tokens)
        level = rows if rows > kv else kv
        return level if level < LEVELS else LEVELS

    def _update_open(self, engine: EngineState) -> None:
        """After a change of its pending prefill or its work."""
        if engine.status is not _READY:
            return
        bit = engine.bit
        if engine.pending_prefill_s < self.max_pending_prefill_s and not self._busy & bit:
            self.open |= bit
        elif self.open & bit:
            self.open ^= bit

    def _update(self, engine: EngineState) -> None:
        """After a change of its requests."""
        if engine.status is not _READY:
            return
        self._update_open(engine)
        level = self._level(engine)
        if level != engine.level:
            bit, by_level, before, group = engine.bit, self.by_level, engine.level, level // GROUP
            by_level[before] ^= bit
            by_level[level] |= bit
            if before // GROUP != group:
                self.by_group[before // GROUP] ^= bit
                self.by_group[group] |= bit
            engine.level = level

    def _index(self, engine: EngineState) -> None:
        engine.level = self._level(engine)
        self.by_level[engine.level] |= engine.bit
        self.by_group[engine.level // GROUP] |= engine.bit
        self._update(engine)

    def _unindex(self, engine: EngineState) -> None:
        bit = engine.bit
        self.by_level[engine.level] ^= bit
        self.by_group[engine.level // GROUP] ^= bit
        self.ready &= ~bit
        self.open &= ~bit
