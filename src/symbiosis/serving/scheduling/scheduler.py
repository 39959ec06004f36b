"""Continuous batching: selects the tokens of each step's batch. Pure bookkeeping with an injected clock.

A step of the engine is `schedule`, the model's forward pass, `update`. Decoding sequences come first, one token each. The
remaining token budget goes to prefill, in chunks. Both are the same operation: a sequence computes the tokens without keys
and values, and samples a token when none remain.

Admission: preempted sequences first, then tenants in the order of their virtual token counters (`fair_queue`). A lane that
was not served for `max_wait_s` precedes all counters, and no other sequence takes the blocks or the adapter slot it waits
for.

Preemption: when blocks run out, the youngest sequence of the least weight is preempted. Its blocks are freed, its tokens
are kept, and their keys and values are recomputed later, or restored from host blocks (`host_blocks`). A sequence that was
preempted once is not preempted again in favour of one that never was, so the oldest sequence always makes progress.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from symbiosis.errors import OutOfRange, TooManyRequests
from symbiosis.serving.scheduling.batch import Batch, BatchBuilder, Chunk
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.fair_queue import FairQueue, Lane, Tenant
from symbiosis.serving.scheduling.sequence import FinishReason, Sequence, SequenceState, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. All are validated."""

    vocab_size: int
    max_length: int
    """Most tokens, prompt and completion, of one sequence."""
    max_rows: int = 2048
    """Most tokens in one batch, over all sequences."""
    max_chunk: int = 512
    """Most tokens of one sequence in one batch, so that short prompts need not wait for long ones."""
    max_running: int = 256
    """Most running sequences."""
    max_queued: int = 4096
    """Most waiting sequences."""
    tenant_running: int = 256
    """Most running sequences of one tenant."""
    tenant_queued: int = 1024
    """Most waiting sequences of one tenant."""
    max_adapters: int = 64
    """Most adapters among running sequences."""
    max_wait_s: float = 2.0
    """A lane that was not served for this long precedes all counters."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves to decoding sequences."""
    prefill_charge: float = 1.0
    decode_charge: float = 2.0
    """Cost of one computed token for a tenant of weight 1."""
    look: int = 8
    """Most lanes of one tenant considered in one step, and most sequences skipped in it for lack of blocks."""

    def __post_init__(self) -> None:
        counts = ("vocab_size", "max_length", "max_chunk", "max_running", "max_queued", "max_adapters", "look")
        for name in (*counts, "tenant_running", "tenant_queued"):
            check_range(name, getattr(self, name), 1, 1 << 31, integer=True)
        # One token more than sequences: prefill makes progress even while all others decode.
        check_range("max_rows", self.max_rows, self.max_running + 1, 1 << 31, integer=True)
        check_range("max_wait_s", self.max_wait_s, 0, 1e9)
        check_range("watermark", self.watermark, 0, 0.5)
        check_range("prefill_charge", self.prefill_charge, 0.001, 1000)
        check_range("decode_charge", self.decode_charge, 0.001, 1000)


def _rank(sequence: Sequence) -> tuple[bool, float, float, str]:
    """The largest is preempted first."""
    return (not sequence.preemptions, -sequence.weight, sequence.arrival, sequence.id)


def _has_prefilled(parent: Sequence, added: Seq[Sequence]) -> bool:
    """Whether it has tokens, and has not just been `added` with them."""
    return parent.output_length > 0 and parent not in added


class Scheduler:
    """Sequences in, batches out. Not thread-safe; one batch at a time.

    `is_resident` returns whether an adapter is on the device. It is called at most once a step for each adapter, and must
    stay true while a sequence of that adapter runs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        is_resident: Callable[[str], bool] = lambda adapter: True,
        chain_order: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`chain_order`: place of each chain's chunks in a batch; empty: the engine has one model."""
        self.config, self._chain_order = config, chain_order
        self.block_manager = block_manager
        self._is_resident = is_resident
        self._reserved_blocks = int(block_manager.num_blocks * config.watermark)
        self._sequences: dict[str, Sequence] = {}  # unfinished
        self._waiting = FairQueue()
        self._running: list[Sequence] = []  # by rank
        self._preempted: list[Sequence] = []  # by rank
        self._running_adapters: Counter[str] = Counter()  # without the base model
        self.num_preemptions = 0
        self._batch: Batch | None = None  # scheduled, not updated yet
        self.draining: dict[str, str] = {}
        """Adapters that admit no sequence, each with the adapter that waits for its memory. Set by the engine."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence that the model and the KV cache allow."""
        return min(self.config.max_length, self.block_manager.num_blocks * self.block_manager.block_size)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, preempted ones included."""
        return self._waiting.num_waiting + len(self._preempted)

    @property
    def adapters(self) -> Mapping[str, int]:
        """Number of running sequences of each adapter, without the base model."""
        return self._running_adapters

    def counter(self, tenant: str) -> float:
        """The virtual token counter of a tenant; of an unknown one, the counter it would start with."""
        known = self._waiting.tenants.get(tenant)
        return self._waiting.virtual_time if known is None else known.counter

    def find_sequences(self, adapter: str) -> list[Sequence]:
        """The unfinished sequences of an adapter."""
        return [sequence for sequence in self._sequences.values() if sequence.adapter == adapter]

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences of one tenant: all, or none and an error. A resumed one that has all its tokens finishes at once.

        Raises `OutOfRange`, `ContextTooLong` or `TooManyRequests`.
        """
        if not sequences:
            return
        name = sequences[0].tenant
        for sequence in sequences:
            if sequence.tenant != name or sequence.id in self._sequences or sequence.state is not SequenceState.WAITING:
                raise OutOfRange(f"{sequence.id} is known already, or of another tenant", field="id", expected="a new sequence")
            sequence.check(vocab_size=self.config.vocab_size, max_length=self.max_model_len)
        if len({sequence.id for sequence in sequences}) != len(sequences):
            raise OutOfRange("two sequences have the same id", field="id", expected="unique ids")
        tenant = self._waiting.tenants.get(name)
        waiting, most = 0 if tenant is None else tenant.num_waiting, self.config.tenant_queued
        if waiting + len(sequences) > most:
            raise TooManyRequests(f"queue of tenant {name} is full: {len(sequences)} new + {waiting} waiting > {most} allowed")
        waiting, most = self._waiting.num_waiting, self.config.max_queued
        if waiting + len(sequences) > most:
            raise TooManyRequests(f"queue is full: {len(sequences)} new + {waiting} waiting > {most} allowed. Try again later")
        for sequence in sequences:
            self._sequences[sequence.id] = sequence
            max_tokens = sequence.sampling.max_tokens or self.max_model_len
            sequence.max_length = min(sequence.prompt_length + max_tokens, self.max_model_len)
            parent = sequence.parent
            if parent is not None and (self._sequences.get(parent.id) is not parent or _has_prefilled(parent, sequences)):
                parent = None
            self._waiting.add(sequence, parent=parent)
        for sequence in sequences:
            if sequence.output_length and (reason := sequence.end_reason(sequence.tokens[-1])) is not None:
                self._waiting.remove(sequence)
                self._finish(sequence, reason)

    def cancel(self, id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Finish a sequence now, even in mid-step, and free its blocks. False if the id is unknown."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            self._preempted.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._finish(sequence, reason)
        return True

    def schedule(self, now: float) -> Batch:
        """The next batch; without chunks if nothing can be computed now. `update` or `preempt` must follow."""
        assert self._batch is None, "the last batch was not updated"
        builder = BatchBuilder(self.config.max_rows, set(self._running_adapters), now, dict(self.draining), self._chain_order)
        self._schedule_decodes(builder)
        for sequence in self._running:
            if builder.token_budget <= 0:
                break
            if sequence.num_pending_tokens > 1 and self._check_resident(builder, sequence.adapter):
                builder.add_chunk(sequence, self._max_chunk(sequence))
        self._resume_preempted(builder)
        self._admit_waiting(builder)
        self._batch = builder.build()
        return self._batch

    def update(self, batch: Batch, tokens: Seq[int]) -> list[Sequence]:
        """Record a computed batch and the `tokens` sampled for `batch.sampled`. Returns the finished sequences.

        A token below 0 marks logits without a valid token (NaN): only that sequence fails.
        """
        assert batch is self._batch, "not the batch that was scheduled last"
        self._batch = None
        expected = len(batch.sampled)
        if len(tokens) != expected:
            raise ValueError(f"{len(tokens)} tokens for {expected} sequences")
        sampled = iter(tokens)
        finished: list[Sequence] = []
        tenants, children = self._waiting.tenants, self._waiting.children
        running, charge, block_size = SequenceState.RUNNING, self.config.decode_charge, self.block_manager.block_size
        for chunk in batch.chunks:
            token = next(sampled) if chunk.samples else None
            sequence = chunk.sequence
            if sequence.state is not running:
                continue  # cancelled in mid-step
            sequence.num_computed_tokens = chunk.start + chunk.count
            if sequence.received:
                self.block_manager.skip_received(sequence)
            computed = sequence.num_computed_tokens
            if computed >= (sequence.num_hashed_blocks + 1) * block_size:
                self.block_manager.cache_full_blocks(sequence)
            if token is None:
                continue
            if children and sequence.id in children:
                self._waiting.release_children(sequence.id)
            tenants[sequence.tenant].counter += charge / sequence.weight
            reason = sequence.append_token(token)
            if reason is not None:
                self._finish(sequence, reason)
                finished.append(sequence)
        if finished:
            self._running = [sequence for sequence in self._running if sequence.state is SequenceState.RUNNING]
        return finished

    def preempt(self, batch: Batch) -> None:
        """Preempt every sequence of a batch whose step failed: each resumes from its last sampled token."""
        assert batch is self._batch, "not the batch that was scheduled last"
        self._batch = None
        for chunk in batch.chunks:
            if chunk.sequence.state is SequenceState.RUNNING:
                self._running.remove(chunk.sequence)
                self._preempt(chunk.sequence)

    def check_integrity(self) -> None:
        """Assert that all state is consistent. Called by tests."""
        self.block_manager.check_integrity(self._running)
        waiting = self._waiting.check_integrity(self._running, self._preempted)
        assert all(sequence.state is SequenceState.RUNNING for sequence in self._running)
        assert all(sequence.state is SequenceState.PREEMPTED and not sequence.block_table for sequence in self._preempted)
        assert len(self._running) <= self.config.max_running
        unfinished = [*waiting, *self._running, *self._preempted]
        assert {sequence.id: sequence for sequence in unfinished} == self._sequences
        assert len(unfinished) == len(self._sequences)
        assert all(parent in self._sequences for parent in self._waiting.children)
        for sequences in (self._running, self._preempted):
            assert sequences == sorted(sequences, key=_rank)
        assert self._running_adapters == Counter(sequence.adapter for sequence in self._running if sequence.adapter)
        assert len(self._running_adapters) <= self.config.max_adapters
        assert all(tenant.num_running <= self.config.tenant_running for tenant in self._waiting.tenants.values())

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The only transition to FINISHED. The caller removes the sequence from its list."""
        assert sequence.state is not SequenceState.FINISHED, f"{sequence.id} finished twice"
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence)
        sequence.state, sequence.reason = SequenceState.FINISHED, reason
        del self._sequences[sequence.id]
        self._waiting.finish(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the blocks and the adapter reference of a running sequence."""
        self.block_manager.free(sequence)
        self._waiting.tenants[sequence.tenant].num_running -= 1
        if sequence.adapter:
            self._running_adapters[sequence.adapter] -= 1
            if not self._running_adapters[sequence.adapter]:
                del self._running_adapters[sequence.adapter]

    def _preempt(self, sequence: Sequence) -> None:
        """The caller removes the sequence from the running list."""
        self._release(sequence)
        sequence.state = SequenceState.PREEMPTED
        sequence.preemptions += 1
        self.num_preemptions += 1
        insort(self._preempted, sequence, key=_rank)

    def _check_resident(self, builder: BatchBuilder, adapter: str) -> bool:
        """Whether the adapter is on the device; records it as missing if not."""
        is_resident = builder.resident.get(adapter)
        if is_resident is None:
            is_resident = builder.resident[adapter] = self._is_resident(adapter)
        if not is_resident and len(builder.missing_adapters) < self.config.max_adapters:
            builder.missing_adapters[adapter] = None
        return is_resident

    def _schedule_decodes(self, builder: BatchBuilder) -> None:
        """One token for each decoding sequence. Without free blocks, the sequences of the highest rank are preempted."""
        running, position = self._running, 0
        resident, block_size = builder.resident, self.block_manager.block_size
        while position < len(running):
            sequence = running[position]
            position += 1
            length = len(sequence.tokens)
            if length - sequence.num_computed_tokens != 1:
                continue
            if not (resident.get(sequence.adapter) or self._check_resident(builder, sequence.adapter)):
                continue
            while length > len(sequence.block_table) * block_size and not self.block_manager.grow(sequence, length):
                victim = running.pop()
                self._preempt(victim)
                builder.preempted.append(victim)
                if victim is sequence:
                    break
            else:
                builder.chunks.append(Chunk(sequence, length - 1, 1, True))
                builder.token_budget -= 1

    def _resume_preempted(self, builder: BatchBuilder) -> None:
        """Preempted sequences resume before any admission, the lowest rank first."""
        if builder.preempted:
            builder.is_closed = True  # blocks have just run out
            return
        for sequence in list(self._preempted):
            if builder.is_closed or not self._has_capacity(builder):
                return
            if self._waiting.tenants[sequence.tenant].num_running >= self.config.tenant_running:
                continue
            has_slot = self._reserve_adapter_slot(builder, sequence.adapter, urgent=True)
            if has_slot and not self._start(builder, sequence, urgent=True):
                return

    def _admit_waiting(self, builder: BatchBuilder) -> None:
        """Admit sequences of lanes that waited too long, then of the tenant with the least counter."""
        tenants = self._waiting.find_candidates(self.config.tenant_running)
        if not tenants:
            return
        if builder.is_closed or not self._has_capacity(builder):
            # Report the adapters needed next, so that they load meanwhile.
            for tenant in heapq.nsmallest(self.config.look, tenants, key=lambda tenant: tenant.counter):
                self._check_resident(builder, next(iter(tenant.lanes)))
            return
        heap: list[tuple[bool, float, str, Tenant, deque[Lane]]] = []
        for tenant in tenants:
            lanes = deque(islice(tenant.lanes.values(), self.config.look))
            heap.append((*self._priority(builder, tenant, lanes[0]), tenant.name, tenant, lanes))
        heapq.heapify(heap)
        skipped_charge: dict[str, float] = {}
        while heap and not builder.is_closed and self._has_capacity(builder):
            by_counter, _, name, tenant, lanes = heapq.heappop(heap)
            lane, urgent = lanes.popleft(), not by_counter
            sequence = next(iter(lane.sequences.values()))
            if self._reserve_adapter_slot(builder, lane.adapter, urgent=urgent):
                if not self._start(builder, sequence, urgent=urgent):
                    continue  # too few blocks for this tenant's next sequence: another tenant's may be shorter
                if tenant.num_running >= self.config.tenant_running:
                    continue
                if lane.sequences:
                    lanes.append(lane)
            else:  # charged as if it ran: otherwise one tenant's missing adapters would all load before another's
                charge = sequence.num_pending_tokens * self.config.prefill_charge / sequence.weight
                skipped_charge[name] = skipped_charge.get(name, 0.0) + charge
            if lanes:
                by_counter, key = self._priority(builder, tenant, lanes[0])
                heapq.heappush(heap, (by_counter, key + by_counter * skipped_charge.get(name, 0.0), name, tenant, lanes))

    def _priority(self, builder: BatchBuilder, tenant: Tenant, lane: Lane) -> tuple[bool, float]:
        """Least first: (False, time last served) for lanes that waited too long, (True, counter) for others."""
        if builder.now - lane.last_served > self.config.max_wait_s:
            return (False, lane.last_served)
        return (True, tenant.counter)

    def _has_capacity(self, builder: BatchBuilder) -> bool:
        return builder.token_budget > 0 and len(self._running) < self.config.max_running

    def _reserve_adapter_slot(self, builder: BatchBuilder, adapter: str, *, urgent: bool) -> bool:
        """Whether the adapter can be in this batch. An urgent one keeps the slot it needs, even if it is still loading."""
        if not adapter:
            return True
        if adapter in builder.draining:
            return False
        if adapter not in builder.adapters and len(builder.adapters) >= self.config.max_adapters:
            if urgent and adapter not in builder.draining.values():
                running = self._running_adapters
                busy = [other for other in running if other not in builder.draining]
                if busy:  # the one with the fewest sequences admits no more until its slot is free
                    builder.draining[min(busy, key=lambda other: (running[other], other))] = adapter
            return False
        is_resident = self._check_resident(builder, adapter)
        if is_resident or urgent:
            builder.adapters.add(adapter)
        return is_resident

    def _start(self, builder: BatchBuilder, sequence: Sequence, *, urgent: bool) -> bool:
        """Allocate a sequence's blocks and add its first chunk; False if too few blocks are free."""
        parent = sequence.parent
        if parent is not None and (parent.state is not SequenceState.RUNNING or parent in builder.copies):
            parent = None
        reserved = self._reserved_blocks if self._running else 0
        copies = self.block_manager.allocate(sequence, len(sequence.tokens) + 1, reserved=reserved, parent=parent)
        if copies is None:
            builder.num_skipped += 1
            builder.is_closed = builder.is_closed or urgent or builder.num_skipped >= self.config.look
            return False
        if copies:
            builder.copies[sequence] = copies
        if sequence.state is SequenceState.PREEMPTED:
            self._preempted.remove(sequence)  # recomputed tokens are not charged again
        else:
            charge = sequence.num_pending_tokens * self.config.prefill_charge / sequence.weight
            self._waiting.admit(sequence, charge, builder.now)
        sequence.state = SequenceState.RUNNING
        self._waiting.tenants[sequence.tenant].num_running += 1
        if sequence.adapter:
            self._running_adapters[sequence.adapter] += 1
        insort(self._running, sequence, key=_rank)
        builder.add_chunk(sequence, self._max_chunk(sequence))
        return True

    def _max_chunk(self, sequence: Sequence) -> int:
        """Most tokens of its next chunk, which ends where the received blocks begin."""
        most, received = min(self.config.max_chunk, sequence.chunk_limit), sequence.received
        if not received:
            return most
        return min(most, received.start * self.block_manager.block_size - sequence.num_computed_tokens)
