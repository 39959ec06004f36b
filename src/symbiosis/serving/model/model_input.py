"""The rows of a batch: the tokens of its chunks, concatenated."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from symbiosis.kernels.tiles import Span
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter, VirtualTokens
from symbiosis.serving.model.paged_attention import PrefixKV
from symbiosis.serving.scheduling.batch import Chunk


class InputChunk(NamedTuple):
    """Some tokens of a sequence, and where its keys and values are."""

    start: int
    ids: Seq[int]
    block_table: Seq[int]
    adapter: str
    """Its hash; empty without one."""
    samples: bool

    @staticmethod
    def of(chunk: Chunk) -> InputChunk:
        sequence = chunk.sequence
        ids = sequence.tokens[chunk.start : chunk.start + chunk.count]
        return InputChunk(chunk.start, ids, sequence.block_table, sequence.adapter, chunk.samples)


@dataclass(slots=True, eq=False)
class ModelInput:
    """What a forward pass over a batch reads."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    """The rows that the head reads: the last of each chunk that samples."""
    segments: list[AdapterSegment] = field(default_factory=list)
    head_segments: list[AdapterSegment] = field(default_factory=list)
    """Of the rows that the head reads."""
    prefixes: list[PrefixKV] = field(default_factory=list)
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)
    """Embeddings that an adapter supplies, each with its first row."""

    @classmethod
    def of(cls, chunks: Seq[InputChunk], adapters: Mapping[str, EngineAdapter]) -> ModelInput:
        """`adapters` has those of the chunks, by hash."""
        made = cls()
        for chunk in chunks:
            row, count = len(made.ids), len(chunk.ids)
            made.ids += chunk.ids
            made.positions += range(chunk.start, chunk.start + count)
            made.spans.append(Span(row, count, chunk.start, chunk.block_table))
            adapter = adapters[chunk.adapter] if chunk.adapter else None
            if adapter is not None:
                extend_segments(made.segments, adapter, row, row + count)
                if chunk.samples:
                    extend_segments(made.head_segments, adapter, len(made.sampled_rows), len(made.sampled_rows) + 1)
                if adapter.virtual is not None and chunk.start < adapter.virtual.count:
                    made._add_virtual_tokens(chunk, row, adapter.virtual)
            if chunk.samples:
                made.sampled_rows.append(row + count - 1)
        return made

    @property
    def reads_tables(self) -> bool:
        """Whether kernels that read device tables apply all adapters, so that a CUDA graph can compute the batch."""
        if self.prefixes or self.embeds:
            return False
        return all(segment.adapter.decodes_by_table for segment in self.segments)

    def _add_virtual_tokens(self, chunk: InputChunk, row: int, virtual: VirtualTokens) -> None:
        """Add what the adapter supplies for the virtual tokens among a chunk's rows."""
        start, end = chunk.start, min(virtual.count, chunk.start + len(chunk.ids))
        if virtual.embeddings_TD is not None:
            self.embeds.append((row, virtual.embeddings_TD[start:end]))
        else:
            assert virtual.keys_LTKD is not None
            assert virtual.values_LTKD is not None
            self.prefixes.append(PrefixKV(row, virtual.keys_LTKD[:, start:end], virtual.values_LTKD[:, start:end]))


def extend_segments(segments: list[AdapterSegment], adapter: EngineAdapter, start: int, end: int) -> None:
    """Add rows of an adapter: adjacent rows of one adapter are one segment."""
    if segments and segments[-1].adapter is adapter and segments[-1].end == start:
        segments[-1] = AdapterSegment(adapter, segments[-1].start, end)
    else:
        segments.append(AdapterSegment(adapter, start, end))
