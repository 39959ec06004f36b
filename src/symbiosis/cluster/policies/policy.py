"""The policy of a cluster: events of requests and engines in, decisions out. Live and simulated directors feed the same code.

A director calls `submit`, `finish_prefill`, `finish` and the engine events as they happen, `dispatch` after events that free
capacity and ten times a second while requests wait, and `tick` once a second. Time is an argument: the policy has no clock, no
thread and no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from symbiosis.cluster.policies.cluster_state import LEVELS, ClusterRequest, ClusterState, EngineState, EngineStatus, members
from symbiosis.cluster.policies.kv_coordination import KvDirectory
from symbiosis.cluster.policies.migration import MigrationConfig, choose_drains, leaving, lost
from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.policies.placement import LeastLoaded, make_placement
from symbiosis.cluster.policies.replica_sets import ReplicaConfig, ReplicaSet, ReplicaSets
from symbiosis.cluster.policies.scaling import ScalingConfig, WorkScaling, allowed_utilization, change_of_engines
from symbiosis.cluster.policies.tenant_queue import TenantQueue
from symbiosis.cluster.step_cost import StepCost

_LOOK = 4  # tenants of the queue that one dispatch considers after one that did not fit
_LOOK_ADAPTERS = 32  # adapters with waiting requests that one dispatch considers after that
_FADE = 0.995  # of the mean completion length, per completion


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What a cluster's policy does, beyond the cost of its engines."""

    placement: str = "least-loaded"
    max_pending_prefill_s: float = 0.3
    """An engine with more pending prefill takes no further request."""
    max_ahead_s: float = 0.5
    """An engine that has taken work for longer, at the utilization its objective allows, takes no further request."""
    owner_patience_s: float = 0.5
    """Pending prefill up to which the owner of a prompt's KV cache is chosen, if that saves as much."""
    owner_imbalance: float = math.inf
    """Load that the owner may have beyond the least loaded engine, if it has the whole prompt; less for a part of it.

    For engines of unknown cost: otherwise the work that an engine takes at a time bounds it.
    """
    adapter_patience_s: float = 1.0
    """Time a request waits for an engine that has its adapter, unless the adapter is hot. Others pass it meanwhile."""
    timely_s: float = 1.5
    """A request that has waited this long comes after those that can still meet the objective."""
    max_wait_s: float = 60.0
    """And is one of them again after so long."""
    late_work_s: float = 5.0
    """Work by which tenants with timely requests may be ahead of one with late requests."""
    block_tokens: int = 512
    """Tokens of one hash in `ClusterRequest.blocks`."""
    expected_output: float = 200.0
    """Mean completion length before any completion has finished."""
    scale: bool = True
    replicas: ReplicaConfig = ReplicaConfig()  # noqa: RUF009 - frozen
    scaling: ScalingConfig = ScalingConfig()  # noqa: RUF009 - frozen
    migration: MigrationConfig = MigrationConfig()  # noqa: RUF009 - frozen
    tenant_weights: tuple[tuple[str, float], ...] = ()

    def aimed_at(self, objective: Objective) -> PolicyConfig:
        """For this objective, with room for noise. The defaults are for the default one."""
        scaling = replace(self.scaling, tpot_s=objective.tpot_s / 1.25, wait_s=objective.ttft_s / 2)
        return replace(self, timely_s=0.75 * objective.ttft_s, scaling=scaling)


@dataclass(slots=True)
class TickDecisions:
    """What the director does next."""

    start: int = 0
    """Engines to start."""
    drained: list[int] = field(default_factory=list)
    """Engines that take no further request."""
    release: list[int] = field(default_factory=list)
    """Engines without requests that leave."""
    migrate: list[ClusterRequest] = field(default_factory=list)
    """Requests to cancel on their engine; `requeue` follows for each."""
    unload: list[tuple[str, int]] = field(default_factory=list)
    """Adapters that leave an engine's replica set."""


class ClusterControl(Protocol):
    """What a director calls. `ClusterPolicy`, and the baselines of the simulator."""

    state: ClusterState

    def add_engine(self, now: float) -> EngineState:
        """An engine was started."""

    def engine_ready(self, number: int, now: float) -> None:
        """An engine takes requests."""

    def engine_lost(self, number: int, now: float) -> list[ClusterRequest]:
        """An engine is gone: its requests, which `requeue` follows for."""

    def submit(self, request: ClusterRequest, now: float) -> int:
        """The engine for a new request, or -1: it waits, and `dispatch` places it."""

    def dispatch(self, now: float) -> list[ClusterRequest]:
        """Place waiting requests: those that have an engine now."""

    def finish_prefill(self, request: ClusterRequest, now: float) -> None:
        """The first token of a placement."""

    def finish(self, request: ClusterRequest, now: float, output: int) -> None:
        """A request ended after `output` tokens, or was cancelled."""

    def requeue(self, request: ClusterRequest, now: float, generated: int) -> None:
        """A request was cancelled on its engine to go on elsewhere, with so many tokens delivered."""

    def report_pressure(self, request: ClusterRequest, now: float) -> bool:
        """An engine is out of KV cache and preempted a request. Whether to migrate it: `requeue` follows."""

    def cache_blocks(self, number: int, added: tuple[int, ...], evicted: list[int]) -> None:
        """The prefix cache of an engine has changed."""

    def tick(self, now: float) -> TickDecisions:
        """Once a second."""


class ClusterPolicy:
    """Symbiosis' policy. Not thread-safe."""

    def __init__(self, config: PolicyConfig, cost: StepCost, *, seed: int = 0) -> None:
        self.config, self.cost = config, cost
        self.state = ClusterState(config.max_pending_prefill_s, config.max_ahead_s)
        self.replicas = ReplicaSets(config.replicas, cost.slots)
        self.directory = KvDirectory()
        self.queue = TenantQueue(
            dict(config.tenant_weights),
            timely_s=config.timely_s,
            max_wait_s=config.max_wait_s,
            late_work_s=config.late_work_s,
        )
        self.utilization = allowed_utilization(config.scaling, cost.fixed_s)
        self.scaling = WorkScaling(config.scaling, start_s=cost.start_s, utilization=self.utilization)
        self.num_migrations = 0
        self._rule = make_placement(config.placement, seed)
        self._mean_output = config.expected_output
        self._queued_prefill_s = 0.0
        self._waiting: dict[str, dict[int, ClusterRequest]] = {}
        """Queued requests by adapter, in the order in which adapters began to wait."""

    # Engines

    def add_engine(self, now: float) -> EngineState:
        return self.state.add_engine(kv_tokens=self.cost.kv_tokens, max_running=self.cost.max_running, now=now)

    def engine_ready(self, number: int, now: float) -> None:
        self.state.set_status(self.state.engines[number], EngineStatus.READY, now)

    def engine_lost(self, number: int, now: float) -> list[ClusterRequest]:
        engine = self.state.engines[number]
        requests = lost(engine)
        self.state.set_status(engine, EngineStatus.DRAINING, now)  # until its requests are elsewhere
        self.replicas.drop_engine(number)
        self.directory.drop_engine(number)
        return requests

    def cache_blocks(self, number: int, added: tuple[int, ...], evicted: list[int]) -> None:
        self.directory.add(number, added)
        if evicted:
            self.directory.evict(number, evicted)

    # Requests

    def submit(self, request: ClusterRequest, now: float) -> int:
        cost, blocks = self.cost, request.blocks
        cached = 0
        if blocks:
            _, length = self.directory.find_owners(blocks, self.state.ready)
            cached = min(length * self.config.block_tokens, request.prompt - 1)
        prefill_s = cost.prompt_s(request.prompt, cached)
        self.scaling.arrive(prefill_s, cost.completion_s(request.prompt, int(self._mean_output)))
        self.state.advance(now)
        if not self.queue:
            number = self._place(request, now)
            if number >= 0:
                return number
        self._queue(request)
        return -1

    def dispatch(self, now: float) -> list[ClusterRequest]:
        placed: list[ClusterRequest] = []
        self.state.advance(now)
        while self.queue and self.state.open:
            request = self._place_next(now)
            if request is None:
                break
            self._unqueue(request)
            placed.append(request)
        return placed

    def _place_next(self, now: float) -> ClusterRequest | None:
        """Place a waiting request: the first of the queue's order, or one whose adapter is hot or on an engine with room."""
        for request in self.queue.candidates(now, _LOOK):
            if self._place(request, now) >= 0:
                return request
        with_room = self.state.open & ~self.state.by_level[LEVELS]
        for adapter in islice(self._waiting, _LOOK_ADAPTERS if with_room else 0):
            replicas = self.replicas.sets.get(adapter)
            if replicas is not None and (replicas.mask & with_room or self._is_hot(replicas)):
                request = next(iter(self._waiting[adapter].values()))
                if self._place(request, now) >= 0:
                    return request
        return None

    def finish_prefill(self, request: ClusterRequest, now: float) -> None:
        self.state.finish_prefill(request)

    def finish(self, request: ClusterRequest, now: float, output: int) -> None:
        if request.engine < 0:
            self._unqueue(request)
            return
        self._leave(request)
        self._mean_output += (1 - _FADE) * (output - self._mean_output)

    def requeue(self, request: ClusterRequest, now: float, generated: int) -> None:
        self._leave(request)
        request.generated = generated
        self.num_migrations += 1
        self._queue(request, migrated=True)

    def report_pressure(self, request: ClusterRequest, now: float) -> bool:
        source, tokens = request.engine, request.tokens + int(self._mean_output)
        elsewhere = self.state.open & ~(1 << source)
        if elsewhere and self._rule.choose(self.state, elsewhere, self.state.levels_for(tokens, self.cost.kv_tokens)) >= 0:
            request.avoided |= 1 << source
            return True
        self.state.reserve(request, max(request.reserved, tokens))
        return False

    def find_source(self, request: ClusterRequest, candidates: int) -> int:
        """The least loaded candidate that has a longer prefix of the prompt than the engine of the request, or -1."""
        owners, _ = self.directory.find_owners(request.blocks, candidates)
        if request.engine < 0 or owners >> request.engine & 1:
            return -1
        engines = self.state.engines
        return min(members(owners), key=lambda number: (engines[number].level, number), default=-1)

    # Scaling

    def tick(self, now: float) -> TickDecisions:
        decisions = TickDecisions(unload=self.replicas.shrink(now))
        state = self.state
        for engine in [each for each in state.engines.values() if each.status is EngineStatus.DRAINING]:
            if not engine.requests:
                self._release(engine, now)
                decisions.release.append(engine.number)
            elif state.open:
                decisions.migrate += leaving(engine, now, self.config.migration)
        if self.config.scale:
            self._scale(decisions, now)
        return decisions

    def _scale(self, decisions: TickDecisions, now: float) -> None:
        state = self.state
        need = self.scaling.desired(
            backlog_s=max(0.0, self._queued_prefill_s), kv_share=state.kv_reserved / self.cost.kv_tokens
        )
        ready, starting = state.ready.bit_count(), state.count(EngineStatus.STARTING)
        change = change_of_engines(need, self.scaling.held, ready=ready, starting=starting)
        if change > 0:
            draining = [each for each in state.engines.values() if each.status is EngineStatus.DRAINING]
            for engine in sorted(draining, key=lambda each: -len(each.requests))[:change]:
                state.set_status(engine, EngineStatus.READY, now)  # warm, so it is there at once
                change -= 1
            decisions.start = change
        for engine in choose_drains(state, -change) if change < 0 else []:
            self.drain(engine.number, now)
            decisions.drained.append(engine.number)

    def drain(self, number: int, now: float) -> None:
        """An engine takes no further request; `tick` empties and releases it."""
        self.state.set_status(self.state.engines[number], EngineStatus.DRAINING, now)
        self.replicas.drop_engine(number)

    def _release(self, engine: EngineState, now: float) -> None:
        self.directory.drop_engine(engine.number)
        self.state.set_status(engine, EngineStatus.GONE, now)

    # Placement

    def _place(self, request: ClusterRequest, now: float) -> int:
        state, config = self.state, self.config
        if not state.open and not request.blocks:
            return -1
        allowed = state.ready & ~request.avoided or state.ready
        candidates = state.open & allowed
        tokens, expected = request.tokens, int(self._mean_output)
        reserved = tokens + expected
        overdue = now - request.arrival >= config.timely_s  # any engine, whatever its KV cache
        levels = state.levels_for(0 if overdue else reserved, self.cost.kv_tokens)
        number, cached = self._find_owner(request, allowed, levels) if request.blocks else (-1, 0)
        if number < 0:
            cached = 0
            if request.adapter:
                number = self._place_adapter(request, allowed, levels, now)
            else:
                number = self._rule.choose(state, candidates, levels)
            if number < 0 and overdue:
                number = LeastLoaded().choose(state, candidates, levels)
            if number < 0:
                return -1
        engine = state.engines[number]
        request.cached, request.avoided = cached, 0
        prefill_s = self.cost.prompt_s(tokens, cached)
        work_s = prefill_s + self.cost.completion_s(tokens, expected)
        state.place(
            request,
            engine,
            prefill_s=prefill_s,
            reserved=min(reserved, engine.kv_tokens),
            work_s=work_s / self.utilization,
            now=now,
        )
        if request.adapter:
            self.replicas.place(self.replicas.get(request.adapter), number, now)
        self.queue.charge(request.tenant, work_s)
        return number

    def _find_owner(self, request: ClusterRequest, allowed: int, levels: int) -> tuple[int, int]:
        """The owner of the longest prefix of the prompt, if it is worth its queue: the number and the tokens it has."""
        state, config = self.state, self.config
        owners, length = self.directory.find_owners(request.blocks, allowed)
        if not owners:
            return -1, 0
        cached = min(length * config.block_tokens, request.prompt - 1)
        number = self._rule.choose(state, owners & state.open, levels)
        if number >= 0:
            return (number, cached) if self._is_balanced(number, allowed, levels, cached / request.prompt) else (-1, 0)
        number = LeastLoaded().choose(state, owners, levels)
        if number < 0:
            return -1, 0
        saved_s = self.cost.prompt_s(request.prompt) - self.cost.prompt_s(request.prompt, cached)
        pending_s = state.engines[number].pending_prefill_s
        return (number, cached) if pending_s < min(config.owner_patience_s, saved_s) else (-1, 0)

    def _is_balanced(self, owner: int, allowed: int, levels: int, share: float) -> bool:
        """Whether the owner's load is near enough to that of the least loaded engine, for this share of a prompt."""
        state, most = self.state, self.config.owner_imbalance
        if most == math.inf:
            return True
        least = LeastLoaded().choose(state, allowed & state.open, levels)
        return state.engines[owner].level - state.engines[least].level <= LEVELS * most * share

    def _place_adapter(self, request: ClusterRequest, allowed: int, levels: int, now: float) -> int:
        """An engine of the adapter's replica set; another one if the adapter is hot, or the request has waited for the set."""
        state, replicas = self.state, self.replicas.get(request.adapter)
        candidates, is_hot = state.open & allowed, self._is_hot(replicas)
        if not is_hot or self.replicas.has_spare(replicas):
            number = self._rule.choose(state, candidates & replicas.mask, levels)
            if number >= 0:
                return number
        waited = now - request.arrival >= self.config.adapter_patience_s
        if allowed & replicas.mask and not waited and not is_hot:
            return -1  # its engines free a place sooner than another one is worth a load, and a slot
        others = candidates & ~replicas.mask
        number = self._rule.choose(state, others & ~self.replicas.full, levels)
        if number < 0:
            number = self._rule.choose(state, others, levels)
        return number if number >= 0 else self._rule.choose(state, candidates, levels)

    def _is_hot(self, replicas: ReplicaSet) -> bool:
        state = self.state
        return self.replicas.is_hot(replicas, state.num_requests / max(1, state.ready.bit_count()))

    def _leave(self, request: ClusterRequest) -> None:
        self.state.remove(request)
        if request.adapter:
            self.replicas.finish(request.adapter)

    def _queue(self, request: ClusterRequest, *, migrated: bool = False) -> None:
        self.queue.push(request, migrated=migrated)
        self._queued_prefill_s += self._queue_work(request)
        if request.adapter:
            self._waiting.setdefault(request.adapter, {})[request.id] = request

    def _unqueue(self, request: ClusterRequest) -> None:
        self.queue.remove(request)
        self._queued_prefill_s -= self._queue_work(request)
        if request.adapter:
            waiting = self._waiting[request.adapter]
            del waiting[request.id]
            if not waiting:
                del self._waiting[request.adapter]

    def _queue_work(self, request: ClusterRequest) -> float:
        return self.cost.prompt_s(request.tokens)
