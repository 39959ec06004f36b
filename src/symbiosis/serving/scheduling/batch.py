"""One step's batch: the chunks of sequences that are computed together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

from symbiosis.serving.scheduling.block_manager import BlockCopy
from symbiosis.serving.scheduling.sequence import Sequence


@dataclass(slots=True, eq=False)  # not frozen: a step creates hundreds, and frozen ones take twice as long
class Chunk:
    """Tokens `start` to `start + count` of a sequence. If `samples`, the last one's logits yield a token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Batch:
    """Chunks grouped by chain, and by adapter, the base model first; decode before prefill in each group."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    """Block copies to make before anything is written, as one gather and one scatter."""
    missing_adapters: tuple[str, ...] = ()
    """Adapters that sequences wait for, the most urgent first."""
    preempted: tuple[Sequence, ...] = ()
    num_rows: int = 0
    """Tokens of all chunks."""

    @cached_property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample a token, in row order."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]


@dataclass(slots=True, eq=False)
class BatchBuilder:
    """A batch under construction: the remaining token budget, the adapters in it, the decisions so far."""

    max_rows: int
    adapters: set[str]
    """Those with a slot, or with a reservation for one."""
    now: float
    draining: dict[str, str]
    """Adapters that admit no sequence, each with the adapter that waits for its slot."""
    chain_order: Mapping[str, int] = field(default_factory=dict)
    """Place of each chain's chunks in the batch; empty: the engine has one model."""
    resident: dict[str, bool] = field(default_factory=lambda: {"": True})
    """Whether an adapter is on the device. Each is looked up once a step."""
    token_budget: int = field(init=False)
    """Rows that can still be added."""
    chunks: list[Chunk] = field(default_factory=list)
    copies: dict[Sequence, list[BlockCopy]] = field(default_factory=dict)
    missing_adapters: dict[str, None] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    num_skipped: int = 0
    """Sequences that were not admitted for lack of blocks."""
    is_closed: bool = False
    """Whether this step admits no further sequence."""

    def __post_init__(self) -> None:
        self.token_budget = self.max_rows

    def add_chunk(self, sequence: Sequence, max_tokens: int) -> None:
        """Add the sequence's next tokens, as many as the budget and `max_tokens` allow."""
        pending = sequence.num_pending_tokens
        count = min(pending, self.token_budget, max_tokens)
        self.chunks.append(Chunk(sequence, sequence.num_computed_tokens, count, count == pending))
        self.token_budget -= count

    def build(self) -> Batch:
        """The batch: chunks of one chain together, and of one adapter, the base model first, adapters by number of tokens."""
        chunks = tuple(self.chunks)
        if self.chain_order:
            chunks = tuple(sorted(chunks, key=lambda chunk: self.chain_order[chunk.sequence.chain]))
            by_chain = groupby(chunks, key=lambda chunk: chunk.sequence.chain)
            chunks = tuple(chain.from_iterable(_group_by_adapter(tuple(own)) for _, own in by_chain))
        elif self.adapters:
            chunks = _group_by_adapter(chunks)
        return Batch(
            chunks=chunks,
            copies=tuple(copy for copies in self.copies.values() for copy in copies),
            missing_adapters=tuple(self.missing_adapters),
            preempted=tuple(self.preempted),
            num_rows=self.max_rows - self.token_budget,
        )


def _group_by_adapter(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    groups: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.sequence.adapter, []).append(chunk)
    base = groups.pop("", [])
    counts = {adapter: sum(chunk.count for chunk in group) for adapter, group in groups.items()}
    order = sorted(groups, key=lambda adapter: (counts[adapter], adapter))
    return (*base, *(chunk for adapter in order for chunk in groups[adapter]))
