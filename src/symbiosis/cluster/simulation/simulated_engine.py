"""An engine over virtual time: continuous batching, chunked prefill, prefix cache and adapter slots, without a model.

Between two events the composition of the batch is constant: decode rows, and chunks of prompts. Its steps are computed at once,
as a *span* of `steps` steps: step j takes `first_s + j × growth_s` seconds, since each decode row's context grows by a token.
An event in the middle of a span cuts it at the end of the step that runs, as the real engine admits between steps.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from symbiosis.cluster.policies.cluster_state import ClusterRequest
from symbiosis.cluster.step_cost import StepCost
from symbiosis.common.lrfu_scores import LrfuScores

_NEVER = math.inf
_NUMBER_BITS = 40  # of a request
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


@dataclass(slots=True, eq=False)
class SimulatedRequest(ClusterRequest):
    """A request whose completion length is known to the simulation, and to it alone."""

    output: int = 1
    first_s: float = -1.0
    """Time of the first token."""
    base: int = 0
    """Tokens in the KV cache when its decode began."""
    start: int = 0
    """Decode steps of the engine when its decode began."""
    used: int = 0
    """KV cache tokens of its own, without the cached prefix."""
    remaining: float = 0.0
    """Prompt tokens still to be prefilled."""
    chunk: float = 0.0
    """Prompt tokens of it in one step of the present span."""


@dataclass(slots=True)
class SpanResult:
    """What has happened at the end of a span."""

    prefilled: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)
    preempted: list[SimulatedRequest] = field(default_factory=list)
    cached: list[tuple[int, ...]] = field(default_factory=list)
    """Blocks added to the prefix cache."""
    evicted: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything has happened."""
        return bool(self.prefilled or self.finished or self.preempted or self.cached or self.evicted)


class SimulatedEngine:
    """One engine. `wake` is the time of its next event."""

    def __init__(self, number: int, cost: StepCost, block_tokens: int) -> None:
        self.number, self.cost, self.block_tokens = number, cost, block_tokens
        self.wake = _NEVER
        self.version = 0
        """Changes with `wake`."""
        self.waiting: deque[SimulatedRequest] = deque()
        self.prefilling: list[SimulatedRequest] = []
        self.decoding: dict[int, SimulatedRequest] = {}
        """By number."""
        self.decode_steps = 0
        self.context = 0
        """Tokens in the KV cache of decoding requests."""
        self.kv_used = 0
        """KV cache tokens of running requests."""
        self.adapters: dict[str, float] = {}
        """Time from which each adapter is resident, least recently used first."""
        self._scores = LrfuScores()
        self.adapter_loads = 0
        self.preemptions = 0
        self.busy_s = 0.0
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the prefix cache, least recently used first
        self._ends: list[int] = []
        """A heap of decoding requests: the decode step of the last token, and the number in the low bits."""
        self._result = SpanResult()
        self._time = 0.0  # start of the span
        self._steps = 0
        self._first_s = self._growth_s = 0.0
        self._is_full = False  # no request could join the present span

    def add(self, request: SimulatedRequest, now: float) -> None:
        """A request arrives."""
        adapter = request.adapter
        if adapter:
            self._scores.use(adapter, len(self.adapters))
            resident_at = self.adapters.pop(adapter, None)
            if resident_at is None:
                self._load_adapter(adapter, now)
            else:
                self.adapters[adapter] = resident_at
        self.waiting.append(request)
        if not self._steps or now <= self._time:  # idle, or the span begins now
            self._time = now
            self._plan()
        elif not self._is_full:
            self._cut(now)

    def advance(self) -> SpanResult:
        """Complete the span that ends at `wake`, and begin the next."""
        result = self._result
        self._complete(self._steps, result)
        self._plan()
        if result:
            self._result = SpanResult()
        return result

    def cancel(self, request: SimulatedRequest, now: float) -> int:
        """Remove a request before it ends; the tokens generated in this placement."""
        if self._steps:
            self._complete(min(self._count_steps(now, completed=True), self._steps - 1), self._result)
        self._time = now  # the step that runs begins again without the request
        generated = 0
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)
            self.kv_used -= request.used
        else:
            generated = self.decode_steps - request.start + 1
            self._leave(request)
            self._drop_end(request)
        self._plan()
        return generated

    def resident(self) -> int:
        return len(self.adapters)

    def _load_adapter(self, adapter: str, now: float) -> None:
        self.adapter_loads += 1
        if len(self.adapters) >= self.cost.slots:
            used = {request.adapter for request in (*self.waiting, *self.prefilling)}
            used |= {request.adapter for request in self.decoding.values()}
            victim = min((name for name in self.adapters if name not in used), key=self._scores.get, default=None)
            if victim is not None:
                del self.adapters[victim]
        self.adapters[adapter] = now + self.cost.adapter_load_s

    def _seconds(self, steps: int) -> float:
        return steps * (self._first_s + self._growth_s * (steps - 1) / 2)

    def _count_steps(self, now: float, *, completed: bool) -> int:
        """Steps of the span that have completed by `now`, or have begun."""
        elapsed, first, growth = now - self._time, self._first_s, self._growth_s
        if elapsed <= 0:
            return 0
        guess = elapsed / first
        steps = int(elapsed / (first + growth * guess / 2)) if growth else int(guess)
        seconds = self._seconds(steps)
        while steps and seconds > elapsed:
            steps -= 1
            seconds = self._seconds(steps)
        while (after := self._seconds(steps + 1)) <= elapsed:
            steps, seconds = steps + 1, after
        return steps if completed or seconds >= elapsed else steps + 1

    def _cut(self, now: float) -> None:
        """End the span with the step that runs at `now`."""
        steps = max(1, self._count_steps(now, completed=False))
        if steps < self._steps:
            self._steps = steps
            self.wake = self._time + self._seconds(steps)
            self.version += 1

    def _complete(self, steps: int, result: SpanResult) -> None:
        """Do `steps` steps of the span."""
        if not steps:
            return
        seconds = self._seconds(steps)
        self.busy_s += seconds
        self._time = now = self._time + seconds
        decoding = self.decoding
        grown = len(decoding) * steps
        self.context += grown
        self.kv_used += grown
        self.decode_steps = decode_steps = self.decode_steps + steps
        self._first_s += self._growth_s * steps
        self._steps -= steps
        ends = self._ends
        while ends and ends[0] >> _NUMBER_BITS <= decode_steps:
            request = decoding[heapq.heappop(ends) & _NUMBER_MASK]
            self._leave(request)
            self._finish(request, result)
        if self.prefilling:
            still = []
            for request in self.prefilling:
                request.remaining = remaining = request.remaining - request.chunk * steps
                if remaining > 1e-6:
                    still.append(request)
                    continue
                if request.first_s < 0:
                    request.first_s = now
                result.prefilled.append(request)
                left = request.output - request.generated - 1
                request.base, request.start = request.prompt + request.generated, decode_steps
                if left <= 0:
                    self.kv_used -= request.used
                    self._finish(request, result)
                else:
                    self.context += request.base
                    decoding[request.id] = request
                    heapq.heappush(ends, (decode_steps + left) << _NUMBER_BITS | request.id)
            self.prefilling = still

    def _leave(self, request: SimulatedRequest) -> None:
        """A decoding request frees its KV cache."""
        del self.decoding[request.id]
        grown = self.decode_steps - request.start
        self.context -= request.base + grown
        self.kv_used -= request.used + grown

    def _drop_end(self, request: SimulatedRequest) -> None:
        self._ends = [end for end in self._ends if end & _NUMBER_MASK != request.id]
        heapq.heapify(self._ends)

    def _finish(self, request: SimulatedRequest, result: SpanResult) -> None:
        result.finished.append(request)
        if request.blocks:
            self._cache_blocks(request.blocks, result)

    def _plan(self) -> None:
        """The next span, from the requests that can run now."""
        cost, result = self.cost, self._result
        adapter_at = self._admit(result) if self.waiting else _NEVER
        rows = len(self.decoding)
        while rows and self.kv_used + rows > cost.kv_tokens and rows + len(self.prefilling) > 1:
            self._preempt(result)
            rows = len(self.decoding)
        self.version += 1
        prefilling = self.prefilling
        if not rows and not prefilling:
            self._steps = 0
            self.wake = adapter_at
            if adapter_at < _NEVER:
                self._time = self.wake
            return
        context_s = cost.context_s
        steps = 1 << 40
        if rows:
            steps = min((self._ends[0] >> _NUMBER_BITS) - self.decode_steps, (cost.kv_tokens - self.kv_used) // rows)
            steps = max(steps, 1)
        first = cost.fixed_s + cost.row_s * rows + context_s * self.context
        growth = context_s * rows
        budget: float = cost.max_rows - rows
        if prefilling:
            max_chunk = cost.max_chunk
            for request in prefilling:
                chunk = remaining = request.remaining
                chunk = min(chunk, max_chunk)
                chunk = min(chunk, budget)
                request.chunk = chunk
                if chunk > 0:
                    budget -= chunk
                    needed = math.ceil(remaining / chunk)
                    steps = min(steps, needed)
            attention_s, prefill_s = cost.attention_s, cost.prefill_s
            for request in prefilling:
                chunk = request.chunk
                if chunk > 0:
                    remaining = request.remaining
                    if chunk * steps > remaining:  # the last chunk is shorter: the mean of all
                        chunk = request.chunk = remaining / steps
                    before = request.prompt + request.generated - remaining
                    first += chunk * (prefill_s + attention_s * (before + chunk / 2))
                    growth += attention_s * chunk * chunk
        self._is_full = budget <= 0 or rows + len(prefilling) >= cost.max_running
        self._steps, self._first_s, self._growth_s = steps, first, growth
        self.wake = self._time + steps * (first + growth * (steps - 1) / 2)
        if adapter_at < self.wake:
            self._cut(adapter_at)

    def _admit(self, result: SpanResult) -> float:
        """Move waiting requests to prefill; the time at which the next adapter is resident."""
        cost, now, adapter_at, waiting = self.cost, self._time, _NEVER, self.waiting
        skipped: list[SimulatedRequest] = []
        running = len(self.decoding) + len(self.prefilling)
        while waiting and running < cost.max_running:
            request = waiting[0]
            if request.adapter:
                at = self.adapters.get(request.adapter)
                if at is None:
                    self._load_adapter(request.adapter, now)
                    at = self.adapters[request.adapter]
                if at > now + 1e-9:
                    adapter_at = min(adapter_at, at)
                    skipped.append(waiting.popleft())
                    continue
            tokens = request.prompt + request.generated
            cached = self._find_cached(request.blocks, tokens) if request.blocks else 0
            used = tokens - cached
            if running and self.kv_used + used + len(self.decoding) > cost.kv_tokens:
                break
            waiting.popleft()
            request.used, request.remaining = used, used
            self.kv_used += used
            self.prefilling.append(request)
            running += 1
            if self._blocks:
                self._evict_blocks(result)
        if skipped:
            waiting.extendleft(reversed(skipped))
        return adapter_at

    def _preempt(self, result: SpanResult) -> None:
        """The youngest decoding request gives its KV cache back, and prefills its tokens again."""
        request = max(self.decoding.values(), key=lambda each: (each.arrival, each.id))
        self._leave(request)
        self._drop_end(request)
        request.generated += self.decode_steps - request.start + 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        result.preempted.append(request)

    def _find_cached(self, blocks: tuple[int, ...], tokens: int) -> int:
        held, length = self._blocks, 0
        for block in blocks:
            if block not in held:
                break
            held.move_to_end(block)
            length += 1
        return min(length * self.block_tokens, tokens - 1)

    def _cache_blocks(self, blocks: tuple[int, ...], result: SpanResult) -> None:
        held = self._blocks
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
        result.cached.append(blocks)
        self._evict_blocks(result)

    def _evict_blocks(self, result: SpanResult) -> None:
        most = max(0, self.cost.kv_tokens - self.kv_used) // self.block_tokens
        while len(self._blocks) > most:
            result.evicted.append(self._blocks.popitem(last=False)[0])
