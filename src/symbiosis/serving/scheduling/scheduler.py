"""Which tokens of which sequences are computed in the next pass? A pure object: it sees requests and a time.

A step of the engine is `plan`, the pass itself, `done`. Sequences that decode
come first, one row each; the rows left go to prompts, in chunks. There is no
difference between the two but the number of rows: a sequence always computes
the tokens that have no keys yet, and chooses a token when it has reached its end.

Who is admitted: first those that had to make room, then tenants in the order
of their counters. A tenant's counter grows with the tokens computed for it,
divided by its weight (virtual token counters, as in S-LoRA's fair scheduler);
a tenant that comes back is lifted to the least counter of those who wait, so
that nobody saves up. A tenant's queue has a lane for each adapter, so an
adapter that is still being loaded holds up nobody else. A lane that was not
served for `max_wait_s` goes before all counters, and nobody takes the pages or
the adapter slot it waits for.

Who makes room when pages run out: the youngest of the least weight. Its pages
are freed, its answer is kept, prompt and answer are computed again later. Who
had to make room once does not do so again for anybody who had not: so the
oldest always gets on.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice

from symbiosis.errors import OutOfRange, TooManyRequests
from symbiosis.serving.scheduling.batch import Batch, BatchBuilder, Chunk
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.sequence import FinishReason, Sequence, SequenceState, within


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. All are checked."""

    vocabulary: int
    """How many tokens the model knows."""
    max_length: int
    """Most tokens, prompt and answer, of one sequence."""
    max_rows: int = 2048
    """Most tokens, over all sequences, that one pass computes."""
    max_chunk: int = 512
    """Most tokens of one sequence in a pass, so that short prompts need not wait for long ones."""
    max_running: int = 256
    """Most sequences that have pages at once."""
    max_queued: int = 4096
    """Most sequences that wait at once."""
    tenant_running: int = 128
    """Most sequences of one tenant that have pages at once."""
    tenant_queued: int = 1024
    """Most sequences of one tenant that wait at once."""
    max_adapters: int = 64
    """Most different adapters among the sequences that have pages: the number of slots."""
    max_wait_s: float = 2.0
    """A lane not served for so long goes before all counters."""
    watermark: float = 0.01
    """Share of the pages that admission leaves to those who decode."""
    prefill_charge: float = 1.0
    decode_charge: float = 2.0
    """What one token computed costs a tenant of weight 1."""
    look: int = 8
    """Most lanes of one tenant looked at in one plan, and most sequences passed over because they need too many pages."""

    def __post_init__(self) -> None:
        counts = ("vocabulary", "max_length", "max_chunk", "max_running", "max_queued", "max_adapters", "look")
        for name in (*counts, "tenant_running", "tenant_queued"):
            within(name, getattr(self, name), 1, 1 << 31, whole=True)
        # with one row more than sequences, prompts get on even while all others decode
        within("max_rows", self.max_rows, self.max_running + 1, 1 << 31, whole=True)
        within("max_wait_s", self.max_wait_s, 0, 1e9)
        within("watermark", self.watermark, 0, 0.5)
        within("prefill_charge", self.prefill_charge, 0.001, 1000)
        within("decode_charge", self.decode_charge, 0.001, 1000)


@dataclass(slots=True, eq=False)
class _Lane:
    """Sequences of one tenant with one adapter, first come first served."""

    adapter: str
    since: float
    """When it was served last, or came to be."""
    queue: OrderedDict[str, Sequence] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    counter: float = 0.0
    running: int = 0
    queued: int = 0
    alive: int = 0
    """Sequences that have not ended."""
    lanes: OrderedDict[str, _Lane] = field(default_factory=OrderedDict)
    """Longest not served first; none is empty."""


def _rank(sequence: Sequence) -> tuple[bool, float, float, str]:
    """Smaller is safer when pages run out."""
    return (not sequence.preemptions, -sequence.weight, sequence.arrival, sequence.id)


class Scheduler:
    """Sequences in, passes out. Not safe for threads; one pass at a time.

    `resident` says whether an adapter can be computed with now, and is asked at
    most once a plan for each; it must stay true while a sequence of that adapter runs.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockManager, resident: Callable[[str], bool] = lambda adapter: True
    ) -> None:
        self.config = config
        self.pool = pool
        self._resident = resident
        self._spare = int(pool.count * config.watermark)
        self._sequences: dict[str, Sequence] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}  # those with lanes
        self._children: dict[str, dict[str, Sequence]] = {}  # of a parent whose prompt is not computed yet
        self._queued = 0
        self._running: list[Sequence] = []  # by rank
        self._preempted: list[Sequence] = []  # by rank
        self._adapters: Counter[str] = Counter()  # of those that run, without the base model
        self._virtual = 0.0  # the least counter of those who wait; never falls
        self._flying: Batch | None = None
        self.draining: dict[str, str] = {}
        """Adapters that admit nobody, and who waits for their memory: set by whoever brings adapters."""

    @property
    def longest(self) -> int:
        """Most tokens of one sequence that the model and the cache take."""
        return min(self.config.max_length, self.pool.count * self.pool.page_size)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def adapters(self) -> Mapping[str, int]:
        """How many sequences of each adapter run; without the base model."""
        return self._adapters

    @property
    def waiting(self) -> int:
        """Sequences without pages, also those that had to make room."""
        return self._queued + len(self._preempted)

    def counter(self, tenant: str) -> float:
        """What was computed for a tenant, by weight; what it will be lifted to if it is not known."""
        return self._tenants[tenant].counter if tenant in self._tenants else self._virtual

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences of one tenant: all, or none and an error.

        Raises `OutOfRange`, `ContextTooLong` or `TooManyRequests`.
        """
        if not sequences:
            return
        name = sequences[0].tenant
        for sequence in sequences:
            if sequence.tenant != name or sequence.id in self._sequences or sequence.state is not SequenceState.WAITING:
                raise OutOfRange(f"{sequence.id} is known already, or of another tenant", field="id", expected="a new sequence")
            sequence.check(vocabulary=self.config.vocabulary, longest=self.longest)
        if len({sequence.id for sequence in sequences}) != len(sequences):
            raise OutOfRange("two sequences have one id", field="id", expected="ids that differ")
        tenant = self._tenants.get(name) or _Tenant(name)
        if tenant.queued + len(sequences) > self.config.tenant_queued:
            raise TooManyRequests(
                f"tenant {name} has {tenant.queued} requests waiting, at most {self.config.tenant_queued} may"
            )
        if self._queued + len(sequences) > self.config.max_queued:
            raise TooManyRequests(f"{self._queued} requests are waiting, at most {self.config.max_queued} may. Try again later")
        self._tenants[name] = tenant
        for sequence in sequences:
            self._sequences[sequence.id] = sequence
            sequence.limit = min(sequence.prompt_length + (sequence.sampling.max_tokens or self.longest), self.longest)
            tenant.alive += 1
            tenant.queued += 1
            self._queued += 1
            if sequence.parent is not None and self._computes_prompt(sequence.parent):
                self._children.setdefault(sequence.parent.id, {})[sequence.id] = sequence
            else:
                self._enqueue(tenant, sequence)

    def cancel(self, id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a sequence now, also in mid-pass; its pages are free at once. False if there is none of that id."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        tenant = self._tenants[sequence.tenant]
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            self._preempted.remove(sequence)
        else:
            tenant.queued -= 1
            self._queued -= 1
            self._dequeue(tenant, sequence)
        self._end(sequence, reason)
        return True

    def plan(self, now: float) -> Batch:
        """The next pass; without chunks if nothing can be computed now. `done` or `abandon` must follow."""
        assert self._flying is None, "the last pass is not done"
        plan = BatchBuilder(self.config.max_rows, set(self._adapters), now, self.draining)
        self._decode(plan)
        for sequence in self._running:
            if plan.rows <= 0:
                break
            if sequence.pending > 1 and self._has(plan, sequence.adapter):
                self._add_chunk(plan, sequence)
        self._resume(plan)
        self._admit(plan)
        self._flying = Batch(
            chunks=self._ordered(plan.chunks),
            copies=tuple(copy for copies in plan.copies.values() for copy in copies),
            missing=tuple(plan.missing),
            preempted=tuple(plan.preempted),
        )
        return self._flying

    def done(self, made: Batch, tokens: Seq[int]) -> list[Sequence]:
        """The pass was computed and chose `tokens` for `made.sampled`. Returns the sequences that ended.

        A token below 0 says that the row was not fit to choose from (NaN): that sequence fails, alone.
        """
        assert made is self._flying, "not the pass that was planned last"
        self._flying = None
        expected = len(made.sampled)
        if len(tokens) != expected:
            raise ValueError(f"{len(tokens)} tokens for {expected} sequences")
        chosen = iter(tokens)
        ended: list[Sequence] = []
        for chunk in made.chunks:
            token = next(chosen) if chunk.samples else None
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue  # cancelled in mid-pass
            sequence.computed = chunk.start + chunk.count
            self.pool.commit(sequence)
            if token is None:
                continue
            if sequence.id in self._children:
                self._release_children(sequence.id)
            self._tenants[sequence.tenant].counter += self.config.decode_charge / sequence.weight
            reason = self._append(sequence, token)
            if reason is not None:
                self._end(sequence, reason)
                ended.append(sequence)
        if ended:
            self._running = [sequence for sequence in self._running if sequence.state is SequenceState.RUNNING]
        return ended

    def abandon(self, made: Batch) -> None:
        """The pass failed. Everybody in it begins again, from what is known to have been computed."""
        assert made is self._flying, "not the pass that was planned last"
        self._flying = None
        for chunk in made.chunks:
            if chunk.sequence.state is SequenceState.RUNNING:
                self._running.remove(chunk.sequence)
                self._preempt(chunk.sequence)

    def check_integrity(self) -> None:
        """Everything adds up; tests call it, and the engine when it is idle."""
        self.pool.check_integrity(self._running)
        lanes = [(tenant, lane) for tenant in self._tenants.values() for lane in tenant.lanes.values()]
        queued = [sequence for _, lane in lanes for sequence in lane.queue.values()]
        queued += [child for children in self._children.values() for child in children.values()]
        assert len(queued) == self._queued
        assert all(lane.queue and tenant.name in self._waiting for tenant, lane in lanes)
        assert all(tenant.lanes for tenant in self._waiting.values())
        assert all(sequence.state is SequenceState.WAITING and not sequence.pages for sequence in queued)
        assert all(sequence.state is SequenceState.RUNNING for sequence in self._running)
        assert all(sequence.state is SequenceState.PREEMPTED and not sequence.pages for sequence in self._preempted)
        assert len(self._running) <= self.config.max_running
        everybody = [*queued, *self._running, *self._preempted]
        assert {sequence.id: sequence for sequence in everybody} == self._sequences
        assert len(everybody) == len(self._sequences)
        assert all(parent in self._sequences for parent in self._children)
        for order in (self._running, self._preempted):
            assert order == sorted(order, key=_rank)
        assert self._adapters == Counter(sequence.adapter for sequence in self._running if sequence.adapter)
        assert len(self._adapters) <= self.config.max_adapters
        for tenant in self._tenants.values():
            assert tenant.running == sum(sequence.tenant == tenant.name for sequence in self._running)
            assert tenant.queued == sum(sequence.tenant == tenant.name for sequence in queued)
            assert tenant.running <= self.config.tenant_running
            assert tenant.alive == sum(sequence.tenant == tenant.name for sequence in everybody)

    # Queues

    def _computes_prompt(self, parent: Sequence) -> bool:
        """Whether children should wait for it."""
        return parent.state is not SequenceState.DONE and parent.id in self._sequences and parent.output_length == 0

    def _enqueue(self, tenant: _Tenant, sequence: Sequence, *, first: bool = False) -> None:
        if not tenant.lanes:
            tenant.counter = max(tenant.counter, self._virtual)
            self._waiting[tenant.name] = tenant
        lane = tenant.lanes.get(sequence.adapter)
        if lane is None:
            lane = tenant.lanes[sequence.adapter] = _Lane(sequence.adapter, sequence.arrival)
        lane.queue[sequence.id] = sequence
        if first:
            lane.queue.move_to_end(sequence.id, last=False)

    def _dequeue(self, tenant: _Tenant, sequence: Sequence) -> None:
        """Take a waiting sequence out of wherever it waits."""
        parent = sequence.parent
        if parent is not None and sequence.id in self._children.get(parent.id, ()):
            del self._children[parent.id][sequence.id]
            if not self._children[parent.id]:
                del self._children[parent.id]
            return
        lane = tenant.lanes[sequence.adapter]
        del lane.queue[sequence.id]
        if not lane.queue:
            del tenant.lanes[lane.adapter]
        if not tenant.lanes:
            del self._waiting[tenant.name]

    def _release_children(self, parent: str) -> None:
        """Their prompt is computed, or nobody computes it for them: they go to the head of their lane."""
        for child in reversed(self._children.pop(parent, {}).values()):
            self._enqueue(self._tenants[child.tenant], child, first=True)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one way out. The caller has taken it out of its list, or will."""
        assert sequence.state is not SequenceState.DONE, f"{sequence.id} ended twice"
        tenant = self._tenants[sequence.tenant]
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        sequence.state, sequence.reason = SequenceState.DONE, reason
        del self._sequences[sequence.id]
        self._release_children(sequence.id)
        tenant.alive -= 1
        if not tenant.alive and tenant.counter <= self._virtual:
            self._tenants.pop(tenant.name)  # it would be lifted to that anyway

    def _stop_running(self, sequence: Sequence) -> None:
        self.pool.free(sequence)
        self._tenants[sequence.tenant].running -= 1
        if sequence.adapter:
            self._adapters[sequence.adapter] -= 1
            if not self._adapters[sequence.adapter]:
                del self._adapters[sequence.adapter]

    def _append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """The token, and whether it was the last."""
        if token < 0:
            return FinishReason.FAILED
        sequence.tokens.append(token)
        if token in sequence.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    # Plans

    def _has(self, plan: BatchBuilder, adapter: str) -> bool:
        """Whether the adapter is there; notes that it is missing if not."""
        known = plan.asked.get(adapter)
        if known is None:
            known = plan.asked[adapter] = self._resident(adapter)
        if not known and len(plan.missing) < self.config.max_adapters:
            plan.missing[adapter] = None
        return known

    def _add_chunk(self, plan: BatchBuilder, sequence: Sequence) -> None:
        start, pending = sequence.computed, sequence.pending
        count = min(pending, plan.rows, self.config.max_chunk)
        plan.chunks.append(Chunk(sequence, start, count, count == pending))
        plan.rows -= count

    def _decode(self, plan: BatchBuilder) -> None:
        """One row for each sequence that needs just one. Those at the end of the list make room for those before."""
        running, position = self._running, 0
        here, page_size = plan.asked, self.pool.page_size
        while position < len(running):
            sequence = running[position]
            position += 1
            length = len(sequence.tokens)
            if length - sequence.computed != 1 or not (here.get(sequence.adapter) or self._has(plan, sequence.adapter)):
                continue
            while length > len(sequence.pages) * page_size and not self.pool.grow(sequence, length):
                victim = running.pop()
                self._preempt(victim)
                plan.preempted.append(victim)
                if victim is sequence:
                    break
            else:
                plan.chunks.append(Chunk(sequence, length - 1, 1, True))
                plan.rows -= 1

    def _preempt(self, sequence: Sequence) -> None:
        """Off it goes, but for the list of those that run."""
        self._stop_running(sequence)
        sequence.state = SequenceState.PREEMPTED
        sequence.preemptions += 1
        insort(self._preempted, sequence, key=_rank)

    def _resume(self, plan: BatchBuilder) -> None:
        """Those that had to make room come back before anybody new, the oldest first."""
        if plan.preempted:
            plan.closed = True  # pages have just run out
            return
        for sequence in list(self._preempted):
            if plan.closed or not self._has_room(plan):
                return
            if self._tenants[sequence.tenant].running >= self.config.tenant_running:
                continue
            if self._has_slot(plan, sequence.adapter, urgent=True) and not self._start(plan, sequence, urgent=True):
                return

    def _admit(self, plan: BatchBuilder) -> None:
        """New sequences: of lanes that waited too long, then of the tenant with the least counter."""
        if not self._waiting:
            return
        # who runs as much as it may competes with nobody: its counter says nothing about the others' share
        tenants = [tenant for tenant in self._waiting.values() if tenant.running < self.config.tenant_running]
        if not tenants:
            return
        self._virtual = max(self._virtual, min(tenant.counter for tenant in tenants))
        if plan.closed or not self._has_room(plan):
            self._foresee(plan, tenants)
            return
        order: list[tuple[bool, float, str, _Tenant, deque[_Lane]]] = []
        for tenant in tenants:
            lanes = deque(islice(tenant.lanes.values(), self.config.look))
            order.append((*self._patience(plan, tenant, lanes[0]), tenant.name, tenant, lanes))
        heapq.heapify(order)
        ahead: dict[str, float] = {}
        while order and not plan.closed and self._has_room(plan):
            patient, _, name, tenant, lanes = heapq.heappop(order)
            lane = lanes.popleft()
            sequence = next(iter(lane.queue.values()))
            if self._has_slot(plan, lane.adapter, urgent=not patient):
                if not self._start(plan, sequence, urgent=not patient):
                    continue  # not enough pages for this tenant's next: another's may be smaller
                if tenant.running >= self.config.tenant_running:
                    continue
                if lane.queue:
                    lanes.append(lane)
            else:  # its next stands behind others as if it ran, so that nobody's many cold adapters are all loaded first
                ahead[name] = ahead.get(name, 0.0) + sequence.pending * self.config.prefill_charge / sequence.weight
            if lanes:
                patient, counter = self._patience(plan, tenant, lanes[0])
                heapq.heappush(order, (patient, counter + patient * ahead.get(name, 0.0), name, tenant, lanes))

    def _foresee(self, plan: BatchBuilder, tenants: list[_Tenant]) -> None:
        """Nobody can be admitted now: note whose adapter will be missing next, so that it comes meanwhile."""
        for tenant in heapq.nsmallest(self.config.look, tenants, key=lambda tenant: tenant.counter):
            self._has(plan, next(iter(tenant.lanes)))

    def _patience(self, plan: BatchBuilder, tenant: _Tenant, lane: _Lane) -> tuple[bool, float]:
        """Smaller goes first: (False, since when) for lanes that waited too long, (True, counter) for others."""
        if plan.now - lane.since > self.config.max_wait_s:
            return (False, lane.since)
        return (True, tenant.counter)

    def _has_room(self, plan: BatchBuilder) -> bool:
        return plan.rows > 0 and len(self._running) < self.config.max_running

    def _has_slot(self, plan: BatchBuilder, adapter: str, *, urgent: bool) -> bool:
        """Whether the adapter can be in this pass. Who is urgent keeps the slot it will need free."""
        if not adapter:
            return True
        if adapter in plan.draining:
            return False
        if adapter not in plan.adapters and len(plan.adapters) >= self.config.max_adapters:
            if urgent and adapter not in plan.draining.values():
                busy = [other for other in self._adapters if other not in plan.draining]
                if busy:  # the one with the fewest sequences admits nobody until its slot is free
                    plan.draining[min(busy, key=lambda other: (self._adapters[other], other))] = adapter
            return False
        here = self._has(plan, adapter)
        if here or urgent:
            plan.adapters.add(adapter)
        return here

    def _start(self, plan: BatchBuilder, sequence: Sequence, *, urgent: bool) -> bool:
        """Give a sequence pages and its first chunk; False if there are not enough."""
        parent = sequence.parent
        if parent is not None and (parent.state is not SequenceState.RUNNING or parent in plan.copies):
            parent = None
        spare = self._spare if self._running else 0
        copies = self.pool.allocate(sequence, len(sequence.tokens) + 1, spare=spare, parent=parent)
        if copies is None:
            plan.refused += 1
            plan.closed = plan.closed or urgent or plan.refused >= self.config.look
            return False
        if copies:
            plan.copies[sequence] = copies
        tenant = self._tenants[sequence.tenant]
        if sequence.state is SequenceState.PREEMPTED:  # what is computed again is not charged again
            self._preempted.remove(sequence)
        else:
            tenant.queued -= 1
            self._queued -= 1
            tenant.counter += sequence.pending * self.config.prefill_charge / sequence.weight
            lane = tenant.lanes[sequence.adapter]
            lane.since = plan.now
            tenant.lanes.move_to_end(sequence.adapter)
            self._dequeue(tenant, sequence)
        sequence.state = SequenceState.RUNNING
        tenant.running += 1
        if sequence.adapter:
            self._adapters[sequence.adapter] += 1
        insort(self._running, sequence, key=_rank)
        self._add_chunk(plan, sequence)
        return True

    def _ordered(self, chunks: list[Chunk]) -> tuple[Chunk, ...]:
        """Adapter by adapter, those with as many rows next to each other; decoding comes first in each, as it did before."""
        groups: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            groups.setdefault(chunk.sequence.adapter, []).append(chunk)
        base = groups.pop("", [])
        rows = {adapter: sum(chunk.count for chunk in group) for adapter, group in groups.items()}
        order = sorted(groups, key=lambda adapter: (rows[adapter], adapter))
        return (*base, *(chunk for adapter in order for chunk in groups[adapter]))
