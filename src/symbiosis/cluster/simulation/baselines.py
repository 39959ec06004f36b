"""Baselines: Ray Serve's router and autoscaler, and a fixed number of engines.

Modelled after Ray Serve's documentation (2.5x): the router compares the ongoing requests of two random replicas. The autoscaler
compares the mean of ongoing requests over `look_back_s` with its target, and changes the number of replicas once a decision has
been the same for the whole delay. A replica that leaves finishes its requests. The prefix-aware router prefers the replica with
the longest prefix, while the queues are balanced.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from symbiosis.cluster.policies.cluster_state import ClusterRequest, ClusterState, EngineState, EngineStatus
from symbiosis.cluster.policies.kv_coordination import KvDirectory
from symbiosis.cluster.policies.migration import lost
from symbiosis.cluster.policies.policy import TickDecisions
from symbiosis.cluster.step_cost import StepCost


@dataclass(frozen=True, kw_only=True, slots=True)
class RayServeConfig:
    """Settings of a deployment, with Ray Serve's names and defaults where it has them."""

    target_ongoing_requests: float = 8.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    min_replicas: int = 1
    max_replicas: int = 1 << 20
    prefix_aware: bool = False
    imbalanced_threshold: float = math.inf
    """Difference of ongoing requests above which the prefix-aware router balances load instead."""
    match_rate_threshold: float = 0.1
    autoscale: bool = True
    """False: as many replicas as at the start."""


class RayServe:
    """Ray Serve as a policy of the simulator."""

    def __init__(self, config: RayServeConfig, cost: StepCost, *, block_tokens: int = 512, seed: int = 0) -> None:
        self.config, self.cost = config, cost
        self.state = ClusterState(math.inf)
        self.directory = KvDirectory()
        self._block_tokens = block_tokens
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._ready: list[EngineState] = []
        self._waiting: deque[ClusterRequest] = deque()
        self._ongoing: deque[int] = deque(maxlen=max(1, round(config.look_back_period_s)))
        self._target = 0
        self._streak = 0  # ticks in a row that wanted more (positive) or fewer replicas

    def add_engine(self, now: float) -> EngineState:
        self._target = max(self._target, len(self.state.engines) + 1)
        return self.state.add_engine(kv_tokens=self.cost.kv_tokens, max_running=1 << 30, now=now)

    def engine_ready(self, number: int, now: float) -> None:
        engine = self.state.engines[number]
        self.state.set_status(engine, EngineStatus.READY, now)
        self._ready.append(engine)

    def engine_lost(self, number: int, now: float) -> list[ClusterRequest]:
        engine = self.state.engines[number]
        requests = lost(engine)
        self._drain(engine, now)
        return requests

    def submit(self, request: ClusterRequest, now: float) -> int:
        if not self._ready:
            self._waiting.append(request)
            return -1
        engine = self._choose(request)
        self.state.place(request, engine, prefill_s=0.0, reserved=0)
        return engine.number

    def dispatch(self, now: float) -> list[ClusterRequest]:
        placed: list[ClusterRequest] = []
        while self._waiting and self._ready:
            request = self._waiting.popleft()
            self.submit(request, now)
            placed.append(request)
        return placed

    def finish_prefill(self, request: ClusterRequest, now: float) -> None:
        pass

    def finish(self, request: ClusterRequest, now: float, output: int) -> None:
        self.state.remove(request)

    def requeue(self, request: ClusterRequest, now: float, generated: int) -> None:
        self.state.remove(request)
        request.generated = generated
        self._waiting.append(request)

    def report_pressure(self, request: ClusterRequest, now: float) -> bool:
        return False

    def cache_blocks(self, number: int, added: tuple[int, ...], evicted: list[int]) -> None:
        if self.config.prefix_aware:
            self.directory.add(number, added)
            self.directory.evict(number, evicted)

    def tick(self, now: float) -> TickDecisions:
        decisions = TickDecisions()
        for engine in [each for each in self.state.engines.values() if each.status is EngineStatus.DRAINING]:
            if not engine.requests:
                self.directory.drop_engine(engine.number)
                self.state.set_status(engine, EngineStatus.GONE, now)
                decisions.release.append(engine.number)
        self._ongoing.append(self.state.num_requests + len(self._waiting))
        if not self.config.autoscale:
            return decisions
        desired = self._decide()
        there = len(self._ready) + self.state.count(EngineStatus.STARTING)
        if desired > there:
            decisions.start = desired - there
        for engine in sorted(self._ready, key=lambda each: (len(each.requests), each.number))[: max(0, there - desired)]:
            self._drain(engine, now)
            decisions.drained.append(engine.number)
        return decisions

    def _decide(self) -> int:
        """The number of replicas, changed after a decision was the same for the whole delay."""
        config = self.config
        mean = sum(self._ongoing) / len(self._ongoing)
        desired = min(config.max_replicas, max(config.min_replicas, math.ceil(mean / config.target_ongoing_requests)))
        if desired > self._target:
            self._streak = max(0, self._streak) + 1
            if self._streak > config.upscale_delay_s:
                self._streak, self._target = 0, desired
        elif desired < self._target:
            self._streak = min(0, self._streak) - 1
            if -self._streak > config.downscale_delay_s:
                self._streak, self._target = 0, desired
        else:
            self._streak = 0
        return self._target

    def _drain(self, engine: EngineState, now: float) -> None:
        self.state.set_status(engine, EngineStatus.DRAINING, now)
        self._ready.remove(engine)

    def _choose(self, request: ClusterRequest) -> EngineState:
        ready = self._ready
        if self.config.prefix_aware and request.blocks:
            lengths = [len(each.requests) for each in ready]
            if max(lengths) - min(lengths) <= self.config.imbalanced_threshold:
                owners, found = self.directory.find_owners(request.blocks, self.state.ready)
                if owners and found * self._block_tokens >= self.config.match_rate_threshold * request.prompt:
                    return min(
                        (each for each in ready if owners >> each.number & 1),
                        key=lambda each: (len(each.requests), each.number),
                    )
        if len(ready) < 3:
            return min(ready, key=lambda each: len(each.requests))
        first, second = self._random.sample(ready, 2)
        return first if len(first.requests) <= len(second.requests) else second
