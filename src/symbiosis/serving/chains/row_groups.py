"""The rows of a batch of several chains, grouped by the block that computes them.

A group is a batch of its own: its sequences, their adapters and their keys and values. So the modules of a chain compute a
group as they compute a batch of that chain alone, and rows of chains that share a block are one group there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.model.model_input import InputChunk, ModelInput
from symbiosis.serving.model.paged_attention import PagedKVCache

Partition: TypeAlias = tuple[int, ...]
"""The variant of a module that each chain has, by the chain's number."""


class ChainChunk(NamedTuple):
    """Some tokens of a sequence, and the number of its chain."""

    chain: int
    chunk: InputChunk


class BatchContext(NamedTuple):
    """What the layers read of a batch besides its rows."""

    attention: Any
    adapters: Any


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows that one variant of a module computes."""

    variant: int
    rows: slice | Tensor
    """Of the batch."""
    head_rows: slice | Tensor
    """Of the rows that the head reads."""
    context: BatchContext


@dataclass(slots=True, eq=False)
class RowGroups:
    """The groups of the current batch, made when a layer first asks for them."""

    kv_cache: PagedKVCache
    adapters: ActiveAdapters
    whole: BatchContext = field(init=False)
    """Of the whole batch. The current one, except while a module computes a group."""
    _chunks: Sequence[ChainChunk] = field(init=False, default=())
    _resident: Mapping[str, EngineAdapter] = field(init=False, default_factory=dict)
    _groups: dict[Partition, list[RowGroup]] = field(init=False, default_factory=dict)
    _contexts: dict[tuple[int, ...], BatchContext] = field(init=False, default_factory=dict)
    """By the numbers of their chunks."""

    def begin(self, chunks: Sequence[ChainChunk], resident: Mapping[str, EngineAdapter]) -> ModelInput:
        """Set the next batch. Returns its rows."""
        self._chunks, self._resident = chunks, resident
        self._groups, self._contexts = {}, {}
        made = ModelInput.of([each.chunk for each in chunks], resident)
        self.whole = self._begin(made)
        return made

    def clear(self) -> None:
        """Drop references to adapters of the last batch."""
        self._groups, self._contexts, self._resident = {}, {}, {}
        self.whole = BatchContext(None, None)

    def at(self, partition: Partition) -> list[RowGroup]:
        """The groups at modules with this partition. Leaves the context undefined."""
        found = self._groups.get(partition)
        if found is None:
            found = self._groups[partition] = self._make(partition)
        return found

    def enter(self, context: BatchContext) -> None:
        """Let the layers compute rows of this context."""
        self.kv_cache.batch = context.attention
        self.adapters.restore(context.adapters)

    def _make(self, partition: Partition) -> list[RowGroup]:
        members: dict[int, list[int]] = {}
        for number, (chain, _) in enumerate(self._chunks):
            members.setdefault(partition[chain], []).append(number)
        if len(members) == 1:
            return [RowGroup(next(iter(members)), slice(None), slice(None), self.whole)]
        counts = [len(each.chunk.ids) for each in self._chunks]
        heads = [int(each.chunk.samples) for each in self._chunks]
        device = self.kv_cache.by_block.device
        return [
            RowGroup(variant, _rows(numbers, counts, device), _rows(numbers, heads, device), self._context(numbers))
            for variant, numbers in members.items()
        ]

    def _context(self, numbers: list[int]) -> BatchContext:
        key = tuple(numbers)
        if key not in self._contexts:
            chunks = [self._chunks[number].chunk for number in numbers]
            self._contexts[key] = self._begin(ModelInput.of(chunks, self._resident))
        return self._contexts[key]

    def _begin(self, made: ModelInput) -> BatchContext:
        self.kv_cache.begin(made.spans, made.prefixes)
        self.adapters.begin_batch(made.segments, made.head_segments, (len(made.ids), len(made.sampled_rows)))
        return BatchContext(self.kv_cache.batch, self.adapters.save())


def _rows(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> slice | Tensor:
    """The rows of these chunks, each of which has so many."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return slice(starts[first], starts[last + 1])
    return torch.cat([torch.arange(starts[number], starts[number + 1]) for number in numbers]).to(device)
