"""Computes the next row of every sequence before the scheduler has planned it.

While a GPU computes a pass nobody knows which tokens it will choose; but they
will lie in its memory, and nearly always each sequence goes on from there. So
the pass after it is launched at once, and the GPU does not wait for Python.
When that pass is planned, what was computed ahead is taken. Rows of sequences
that ended meanwhile are nobody's: what they wrote is overwritten, in the order
of the stream, by whoever gets their pages. Plain reference: a runner without it.

B = rows of a pass that choose a token, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.scheduling.batch import Batch, Chunk
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class _Ahead:
    rows: Mapping[Sequence, tuple[int, Chunk, int]]
    """Row, what was computed, and how often the sequence had made room: then its pages are others."""
    logits_BV: Tensor

    def row(self, chunk: Chunk) -> int | None:
        row, computed, preemptions = self.rows.get(chunk.sequence, (0, None, 0))
        same = computed is not None and (computed.start, computed.count) == (chunk.start, chunk.count)
        return row if same and preemptions == chunk.sequence.preemptions else None


class AsyncDecoder:
    """In front of a runner; one pass at a time."""

    def __init__(self, runner: ModelRunner, pool: BlockManager) -> None:
        self._runner, self._pool = runner, pool
        self._ahead: _Ahead | None = None

    def forget(self) -> None:
        """A pass failed: nobody knows what lies in memory."""
        self._ahead = None

    def compute(self, made: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `made.sampled`, [B, V]: those there are, and the others computed now."""
        ahead, self._ahead = self._ahead, None
        rows = [None if ahead is None else ahead.row(chunk) for chunk in made.chunks]
        if ahead is None or all(row is None for row in rows):
            return self._runner.compute(made, adapters)
        if rows == list(range(len(ahead.rows))):
            return ahead.logits_BV
        there = [row for row in rows if row is not None]
        logits_BV = ahead.logits_BV[torch.tensor(there, device=ahead.logits_BV.device)]
        if None not in rows:
            return logits_BV
        rest = tuple(chunk for row, chunk in zip(rows, made.chunks, strict=True) if row is None)
        others_BV = self._runner.compute(replace(made, chunks=rest), adapters)
        known, new = iter(range(len(there))), iter(range(len(there), len(there) + len(others_BV)))
        order = [
            next(new) if row is None else next(known) for row, chunk in zip(rows, made.chunks, strict=True) if chunk.samples
        ]
        return torch.cat([logits_BV, others_BV])[torch.tensor(order, device=logits_BV.device)]

    def run_ahead(self, made: Batch, tokens_B: Tensor, adapters: Mapping[str, EngineAdapter]) -> None:
        """Launch what comes after `made`, which has just chosen these tokens. Logits of it are overwritten."""
        rows, chunks = [], []
        for row, sequence in enumerate(made.sampled):
            length = len(sequence.tokens)
            goes_on = sequence.state is SequenceState.RUNNING and length + 1 < sequence.limit
            if goes_on and self._pool.grow(sequence, length + 1):
                rows.append(row)
                chunks.append(Chunk(sequence, length, 1, True))
        if not chunks:
            return
        if len(rows) < len(tokens_B):
            tokens_B = tokens_B[torch.tensor(rows, device=tokens_B.device)]
        found = self._runner.compute_next(chunks, tokens_B.clamp(min=0), adapters)  # below 0: it failed, and will end
        if found is not None:
            about = {chunk.sequence: (row, chunk, chunk.sequence.preemptions) for row, chunk in enumerate(chunks)}
            self._ahead = _Ahead(about, found)
