"""Which engine takes a request: HTTP processes ask before each placement, and say how it goes on."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from symbiosis.cluster.policies.cluster_state import ClusterRequest, EngineState, EngineStatus
from symbiosis.cluster.policies.kv_coordination import PlacedBlocks
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig, TickDecisions
from symbiosis.cluster.step_cost import StepCost
from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.members import EngineFacts, Member, Members
from symbiosis.errors import BadMessage, EngineLost, SymbiosisError
from symbiosis.server.engines.prompt_blocks import BLOCK_TOKENS, MAX_BLOCKS
from symbiosis.serving.engine_messages import int_field, text_field
from symbiosis.transport.engine_ipc import Body

_MAX_TOKENS = 1 << 24
_MAX_HASH = (1 << 64) - 1
_IMBALANCE = 0.25
"""Without a profile: see `PolicyConfig.owner_imbalance`."""
_MAX_NAMES = 4096
_MIX = 0x9E3779B97F4A7C15
_UNKNOWN = StepCost(fixed_s=0.01, row_s=1e-4, context_s=0.0, prefill_s=1e-6, attention_s=0.0, start_s=20.0, kv_tokens=1)
"""Without a profile. Its seconds mean nothing: see `_config_without_profile`."""
Move = Callable[[str, int], None]
"""Tells a peer that one of its requests has to leave its engine."""


def _config_without_profile(config: PolicyConfig) -> PolicyConfig:
    """Requests and their KV cache count, not seconds: these close no engine to requests, and start none."""
    scaling = replace(config.scaling, fill=math.inf)
    return replace(config, owner_imbalance=_IMBALANCE, max_pending_prefill_s=math.inf, max_ahead_s=math.inf, scaling=scaling)


class Placement:
    """Feeds the policy with events of requests and engines."""

    def __init__(
        self,
        config: PolicyConfig,
        cost: StepCost | None,
        members: Members,
        adapters: ClusterAdapters,
        move: Move,
        *,
        engines: int,
    ) -> None:
        """`cost` None: unknown, and requests count instead of seconds. `engines` are being started."""
        config = config if cost is not None else _config_without_profile(config)
        self._config = replace(config, block_tokens=BLOCK_TOKENS)
        self._cost, self._starting = cost, engines
        self._move = move
        self._members, self._adapters = members, adapters
        self.policy: ClusterPolicy | None = None  # once the limits of an engine are known
        self._numbers = itertools.count(1)
        self._requests: dict[int, tuple[str, ClusterRequest]] = {}
        """Peer and request of each placement."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._moving: set[int] = set()
        """Placements that are to leave their engine."""
        self._blocks = PlacedBlocks(0)
        self._first_engine = asyncio.Event()

    # Engines

    def add_engine(self, member: Member) -> None:
        policy, now = self._make_policy(member.facts), time.monotonic()
        starting = [each for each in policy.state.engines.values() if each.status is EngineStatus.STARTING]
        engine = starting[0] if starting else policy.add_engine(now)
        member.number = engine.number
        self._blocks.drop_engine(engine.number)
        policy.engine_ready(engine.number, now)
        self._first_engine.set()
        self.dispatch()

    def drop_engine(self, member: Member, *, expected: int) -> None:
        """Its requests stay with it until their HTTP processes place them again.

        Another is starting if there are fewer than `expected`.
        """
        assert self.policy is not None
        now = time.monotonic()
        if member.number in self.policy.state.engines:
            self.policy.engine_lost(member.number, now)
        if len(self._there(self.policy)) < expected:
            self.policy.add_engine(now)

    def resize(self, *, min_engines: int, max_engines: int, expected: int) -> None:
        """Other bounds of their number; `expected` of them are there or starting."""
        scaling = replace(self._config.scaling, min_engines=min_engines, max_engines=max_engines)
        self._config = replace(self._config, scaling=scaling)
        if self.policy is None:
            self._starting = expected
            return
        policy, now, there = self.policy, time.monotonic(), self._there(self.policy)
        policy.scaling.config = scaling
        for _ in range(len(there), expected):
            policy.add_engine(now)
        starting = [engine for engine in there if engine.status is EngineStatus.STARTING]
        for engine in starting[: max(0, len(there) - expected)]:
            policy.engine_lost(engine.number, now)

    def _there(self, policy: ClusterPolicy) -> list[EngineState]:
        """Starting, or members; not those that were lost with requests."""
        there, engines = self._members.by_number, policy.state.engines.values()
        return [each for each in engines if each.status is EngineStatus.STARTING or each.number in there]

    def _make_policy(self, facts: EngineFacts) -> ClusterPolicy:
        if self.policy is None:
            cost = replace(self._cost or _UNKNOWN, kv_tokens=facts.kv_tokens, max_running=facts.max_running, slots=facts.slots)
            self.policy = ClusterPolicy(self._config, cost)
            self._blocks = PlacedBlocks(facts.kv_tokens // BLOCK_TOKENS)
            for _ in range(self._starting):
                self.policy.add_engine(time.monotonic())
        return self.policy

    # Operations

    async def place(self, id: str, body: Body) -> Body:
        """The engine of a request, with its adapter loaded there, and the number of this placement.

        `source` is an engine that has more of the prompt, if there is one.
        """
        peer, tenant = id.partition(":")[0], text_field(body, "tenant") if body.get("tenant") else ""
        adapter = "" if body.get("adapter") is None else self._adapters.resolve(text_field(body, "adapter"), tenant)
        prompt, generated = _tokens(body, "prompt"), _tokens(body, "generated")
        blocks = _blocks(body, self._adapters.version(adapter))
        unreachable = _names(body, "unreachable")
        await self._first_engine.wait()
        policy, now = self.policy, time.monotonic()
        assert policy is not None
        moved = int_field(body.get("moved", 0), "moved")
        owner, request = self._requests.get(moved, ("", None))
        if request is None or owner != peer:
            request = ClusterRequest(next(self._numbers), tenant, adapter, max(1, prompt), now, blocks, generated)
            self._requests[request.id] = peer, request
            request.avoided = self._mask_of(unreachable)
            policy.submit(request, now)
        else:
            self._moving.discard(moved)
            request.avoided |= self._mask_of(unreachable)
            if request.engine >= 0:
                policy.requeue(request, now, generated)
                self.dispatch()
        try:
            while True:
                member = await self._placed(request)
                try:
                    await self._adapters.ensure(member, adapter)
                    break
                except EngineLost:
                    policy.requeue(request, time.monotonic(), generated)
        except (asyncio.CancelledError, SymbiosisError):
            self._end(request.id, 0)
            raise
        source = self._find_source(request, self._mask_of(unreachable)) if blocks else None
        if blocks and request.engine >= 0:
            policy.cache_blocks(request.engine, blocks, self._blocks.add(request.engine, blocks))
        return {"engine": member.name, "adapter": adapter or None, "placement": request.id, "source": source}

    def _find_source(self, request: ClusterRequest, unreachable: int) -> str | None:
        """A member that has a longer prefix of the prompt than the engine of the request: its name."""
        assert self.policy is not None
        there = sum(1 << number for number in self._members.by_number)
        number = self.policy.find_source(request, there & ~unreachable)
        return None if number < 0 else self._members.by_number[number].name

    def _mask_of(self, names: list[str]) -> int:
        """Engines that a peer cannot reach. Others may: the director keeps them."""
        members = [self._members.by_name[name] for name in names if name in self._members.by_name]
        return sum(1 << number for number in {member.number for member in members if member.number >= 0})

    async def _placed(self, request: ClusterRequest) -> Member:
        """The engine of a request, once the policy has chosen one that is there."""
        while True:
            if request.engine < 0:
                waiting = self._waiting[request.id] = asyncio.get_running_loop().create_future()
                try:
                    await waiting
                finally:
                    del self._waiting[request.id]
            member = self._members.by_number.get(request.engine)
            if member is not None:
                return member
            assert self.policy is not None  # the engine was lost meanwhile
            self.policy.requeue(request, time.monotonic(), request.generated)
            await asyncio.sleep(0)

    async def progress(self, id: str, body: Body) -> None:
        """First tokens, preemptions and ends of placements, a batch at a time."""
        peer, policy = id.partition(":")[0], self.policy
        try:
            first = [int(number) for number in body.get("first", ())]
            preempted = [int(number) for number in body.get("preempted", ())]
            ended = [(int(number), int(tokens)) for number, tokens in body.get("ended", ())]
        except (TypeError, ValueError):
            raise BadMessage("progress: expected lists of numbers") from None
        for number in first:
            owner, request = self._requests.get(number, ("", None))
            if request is not None and owner == peer and policy is not None and request.engine >= 0:
                policy.finish_prefill(request, time.monotonic())
        for number in preempted:
            if self._requests.get(number, ("",))[0] == peer:
                self._report_pressure(number)
        for number, tokens in ended:
            if self._requests.get(number, ("",))[0] == peer:
                self._end(number, tokens)
        self.dispatch()

    def _report_pressure(self, number: int) -> None:
        """The engine of a placement is out of KV cache: it leaves if another one has room."""
        peer, request = self._requests[number]
        if self.policy is None or request.engine < 0 or number in self._moving:
            return
        engine = self.policy.state.engines[request.engine]
        if engine.status is EngineStatus.READY and self.policy.report_pressure(request, time.monotonic()):
            self._moving.add(number)
            self._move(peer, number)

    def drop_peer(self, peer: str) -> None:
        for number in [number for number, (owner, _) in self._requests.items() if owner == peer]:
            self._end(number, 0)
        self.dispatch()

    def _end(self, number: int, tokens: int) -> None:
        _, request = self._requests.pop(number, ("", None))
        self._moving.discard(number)
        if request is not None and self.policy is not None:
            self.policy.finish(request, time.monotonic(), tokens)

    # Decisions

    def dispatch(self) -> None:
        """Place waiting requests."""
        if self.policy is not None:
            self._wake(self.policy.dispatch(time.monotonic()))

    def _wake(self, requests: Iterable[ClusterRequest]) -> None:
        for request in requests:
            waiting = self._waiting.get(request.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def tick(self) -> TickDecisions:
        """Once a second. Requests of engines that leave are moved."""
        if self.policy is None:
            return TickDecisions()
        decisions = self.policy.tick(time.monotonic())
        for request in decisions.migrate:
            if request.id in self._requests:
                self._move(self._requests[request.id][0], request.id)
        self.dispatch()
        return decisions

    def drain(self, member: Member, *, is_replaced: bool) -> None:
        """It takes no further request, and leaves when it has none."""
        assert self.policy is not None
        now = time.monotonic()
        self.policy.drain(member.number, now)
        if is_replaced:
            self.policy.add_engine(now)

    def stats(self) -> dict[str, Any]:
        policy = self.policy
        if policy is None:
            return {"waiting": 0, "migrations": 0, "placed": 0}
        return {"waiting": len(self._waiting), "migrations": policy.num_migrations, "placed": len(self._requests)}

    def status_of(self, member: Member) -> str:
        assert self.policy is not None
        engine = self.policy.state.engines.get(member.number)
        return "leaving" if engine is None else engine.status.name.lower()


def _names(body: Body, name: str) -> list[str]:
    names = body.get(name, [])
    if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(isinstance(each, str) for each in names):
        raise BadMessage(f"{name}: expected a list of at most {_MAX_NAMES} texts")
    return names


def _blocks(body: Body, version: int) -> tuple[int, ...]:
    """Hashes of the prompt's blocks, those of each version of an adapter apart."""
    blocks = body.get("blocks", [])
    if not isinstance(blocks, list) or len(blocks) > MAX_BLOCKS:
        raise BadMessage(f"blocks: expected a list of at most {MAX_BLOCKS} numbers")
    if not all(type(block) is int and 0 <= block <= _MAX_HASH for block in blocks):
        raise BadMessage("blocks: expected numbers below 2^64")
    return tuple([block ^ (version * _MIX & _MAX_HASH) for block in blocks])


def _tokens(body: Body, name: str) -> int:
    value = int_field(body.get(name, 0), name)
    if not 0 <= value <= _MAX_TOKENS:
        raise BadMessage(f"{name}: expected 0 to {_MAX_TOKENS}")
    return value
