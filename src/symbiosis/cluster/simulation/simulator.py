"""The event loop of the simulator: arrivals, engines and the policy over virtual time."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from symbiosis.cluster.policies.cluster_state import EngineStatus
from symbiosis.cluster.policies.policy import ClusterControl
from symbiosis.cluster.simulation.simulated_engine import SimulatedEngine, SimulatedRequest, SpanResult
from symbiosis.cluster.simulation.trace import Trace
from symbiosis.cluster.step_cost import StepCost

_TICK_S = 1.0
_RETRY_S = 0.1  # waiting requests are looked at as often, even without an event
_MOST_SAMPLES = 400
_MOST_DRAWN = 64  # engines


@dataclass(slots=True)
class Timeline:
    """What the cluster looked like at regular times."""

    seconds: list[float] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    """Requests on each of the first engines, by number; -1 for an engine that is not there."""
    ready: list[int] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)
    """Starting and draining ones included."""
    requests: list[int] = field(default_factory=list)
    """On engines."""
    arrivals: list[int] = field(default_factory=list)
    """Since the last time."""
    adapters: list[int] = field(default_factory=list)
    """Adapters on engines, counted once for each."""


@dataclass(slots=True)
class SimulationResult:
    """Everything a report needs."""

    trace: Trace
    ttft_s: array[float]
    """By request of the trace; infinite for a rejected one."""
    tpot_s: array[float]
    """Mean seconds per token after the first."""
    engine_s: float
    end_s: float
    rejected: int
    migrations: int
    preemptions: int
    adapter_loads: int
    cached_tokens: int
    most_engines: int
    starts: int
    timeline: Timeline


class Simulator:
    """Runs one trace under one policy. `failures` are times at which the fullest engine is lost."""

    def __init__(
        self,
        trace: Trace,
        policy: ClusterControl,
        cost: StepCost,
        *,
        engines: int,
        most_engines: int,
        failures: Sequence[float] = (),
        watch: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`engines` are ready at the start; the policy never gets more than `most_engines`."""
        self._trace, self._policy, self._cost = trace, policy, cost
        self._most_engines = most_engines
        self._engines: dict[int, SimulatedEngine] = {}
        self._events: list[tuple[float, int, int, int]] = []  # time, order, engine or -1 for none, version or kind
        self._order = 0
        self._failures = sorted(failures, reverse=True)
        self._watch = watch
        count = len(trace)
        self.ttft_s, self.tpot_s = array("d", [math.inf]) * count, array("d", [0.0]) * count
        self._unfinished = 0
        self._requests: dict[int, SimulatedRequest] = {}
        self._now = self._engine_s = self._counted_at = 0.0
        self._rejected = self._migrations = self._preemptions = self._adapter_loads = self._cached = 0
        self._most_seen = self._starts = 0
        self._timeline = Timeline()
        self._sample_s = max(_TICK_S, trace.duration / _MOST_SAMPLES)
        self._next_sample, self._sampled_arrivals = 0.0, 0
        for _ in range(engines):
            self._start_engine(0.0, start_s=0.0)

    def run(self) -> SimulationResult:
        """Until every request has ended."""
        trace, events = self._trace, self._events
        arrivals, count, number = trace.arrivals, len(trace), 0
        next_arrival = arrivals[0] if count else math.inf
        next_tick = 0.0
        next_retry = math.inf
        engines, state = self._engines, self._policy.state
        while number < count or self._unfinished:
            at = min(next_arrival, next_tick, next_retry)
            if events and events[0][0] <= at:
                self._now, _, engine, version = heapq.heappop(events)
                if version < 0:
                    self._make_ready(engine)
                else:
                    found = engines.get(engine)
                    if found is not None and found.version == version:
                        self._advance(found)
                continue
            self._now = at
            if next_arrival <= at:
                self._arrive(number)
                number += 1
                next_arrival = arrivals[number] if number < count else math.inf
                if next_retry == math.inf and self._unfinished > state.num_requests:
                    next_retry = at + _RETRY_S
            elif next_tick <= at:
                self._tick(number)
                next_tick = at + _TICK_S
                if next_retry == math.inf and self._unfinished > state.num_requests:
                    next_retry = at + _RETRY_S
            else:
                self._dispatch()
                next_retry = at + _RETRY_S if self._unfinished > state.num_requests else math.inf
        self._count_engines()
        for each in self._engines.values():
            self._retire(each)
        return SimulationResult(
            trace=trace,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            engine_s=self._engine_s,
            end_s=self._now,
            rejected=self._rejected,
            migrations=self._migrations,
            preemptions=self._preemptions,
            adapter_loads=self._adapter_loads,
            cached_tokens=self._cached,
            most_engines=self._most_seen,
            starts=self._starts,
            timeline=self._timeline,
        )

    # Requests

    def _arrive(self, number: int) -> None:
        trace = self._trace
        prompt, output = trace.prompts[number], trace.outputs[number]
        if prompt + output > self._cost.kv_tokens:
            self._rejected += 1
            return
        adapter = trace.adapters[number]
        request = SimulatedRequest(number, adapter, adapter, prompt, self._now, trace.blocks_of(number), output=output)
        self._unfinished += 1
        engine = self._policy.submit(request, self._now)
        if engine >= 0:
            self._send(request)

    def _send(self, request: SimulatedRequest) -> None:
        engine = self._engines[request.engine]
        before = engine.version
        engine.add(request, self._now)
        if engine.version != before:
            self._schedule(engine)

    def _dispatch(self) -> None:
        for request in self._policy.dispatch(self._now):
            assert isinstance(request, SimulatedRequest)
            self._send(request)

    def _advance(self, engine: SimulatedEngine) -> None:
        result, policy, now = engine.advance(), self._policy, self._now
        ttft_s, tpot_s, number = self.ttft_s, self.tpot_s, engine.number
        for request in result.prefilled:
            if request.engine == number:
                policy.finish_prefill(request, now)
                self._cached += request.tokens - request.used
        for request in result.finished:
            policy.finish(request, now, request.output)
            self._unfinished -= 1
            first = request.first_s
            ttft_s[request.id] = first - request.arrival
            if request.output > 1:
                tpot_s[request.id] = (now - first) / (request.output - 1)
        if result.cached or result.evicted or result.preempted:
            self._report(engine, result)
        self._schedule(engine)
        if result.finished or result.prefilled:
            self._dispatch()

    def _report(self, engine: SimulatedEngine, result: SpanResult) -> None:
        policy, now = self._policy, self._now
        for blocks in result.cached:
            policy.cache_blocks(engine.number, blocks, [])
        if result.evicted:
            policy.cache_blocks(engine.number, (), result.evicted)
        for request in result.preempted:
            self._preemptions += 1
            if request.engine == engine.number and policy.report_pressure(request, now):
                self._migrate(request)

    def _migrate(self, request: SimulatedRequest) -> None:
        engine = self._engines[request.engine]
        generated = request.generated + engine.cancel(request, self._now)
        self._migrations += 1
        self._policy.requeue(request, self._now, generated)
        self._schedule(engine)

    # Engines

    def _schedule(self, engine: SimulatedEngine) -> None:
        if engine.wake < math.inf:
            self._order += 1
            heapq.heappush(self._events, (engine.wake, self._order, engine.number, engine.version))

    def _start_engine(self, now: float, start_s: float) -> None:
        self._count_engines()
        state = self._policy.add_engine(now)
        self._starts += 1
        self._most_seen = max(self._most_seen, len(self._policy.state.engines))
        if start_s <= 0:
            self._make_ready(state.number)
        else:
            self._order += 1
            heapq.heappush(self._events, (now + start_s, self._order, state.number, -1))

    def _make_ready(self, number: int) -> None:
        self._engines[number] = SimulatedEngine(number, self._cost, self._trace.block_tokens)
        self._policy.engine_ready(number, self._now)
        self._dispatch()

    def _count_engines(self) -> None:
        self._engine_s += (self._now - self._counted_at) * len(self._policy.state.engines)
        self._counted_at = self._now

    def _retire(self, engine: SimulatedEngine) -> None:
        self._adapter_loads += engine.adapter_loads

    def _tick(self, arrived: int) -> None:
        policy, now = self._policy, self._now
        self._count_engines()
        if self._failures and self._failures[-1] <= now:
            self._failures.pop()
            self._lose_engine()
        decisions = policy.tick(now)
        for number in decisions.release:
            self._retire(self._engines.pop(number))
        for request in decisions.migrate:
            assert isinstance(request, SimulatedRequest)
            self._migrate(request)
        for _ in range(min(decisions.start, self._most_engines - len(policy.state.engines))):
            self._start_engine(now, self._cost.start_s)
        self._dispatch()
        self._watch(now)
        if now >= self._next_sample:
            self._next_sample = now + self._sample_s
            self._sample(arrived)

    def _lose_engine(self) -> None:
        ready = [each for each in self._policy.state.engines.values() if each.status is EngineStatus.READY]
        if not ready:
            return
        fullest = max(ready, key=lambda engine: (len(engine.requests), engine.number))
        for request in self._policy.engine_lost(fullest.number, self._now):
            assert isinstance(request, SimulatedRequest)
            self._migrate(request)

    def _sample(self, arrived: int) -> None:
        timeline, state = self._timeline, self._policy.state
        timeline.seconds.append(self._now)
        timeline.ready.append(state.ready.bit_count())
        timeline.engines.append(len(state.engines))
        timeline.requests.append(state.num_requests)
        timeline.arrivals.append(arrived - self._sampled_arrivals)
        self._sampled_arrivals = arrived
        timeline.adapters.append(sum(engine.resident() for engine in self._engines.values()))
        batches = [-1] * min(_MOST_DRAWN, self._most_engines)
        for number, engine in state.engines.items():
            if number < len(batches) and engine.status is not EngineStatus.STARTING:
                batches[number] = len(engine.requests)
        timeline.batches.append(batches)
