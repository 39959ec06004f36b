"""Launches the next decode step before the scheduler has scheduled it.

While a GPU computes a step, its sampled tokens exist only in device memory, and nearly every sequence continues from them.
So the next step is launched at once, and the GPU does not wait for Python. When the scheduler schedules that step, the
logits computed ahead are used. Rows of sequences that finished meanwhile are discarded: later writes to their blocks follow
in stream order. Reference: a model runner alone.

B = rows that sample a token, V = vocabulary.
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
    """Row, computed chunk, and the sequence's number of preemptions: a preemption replaces its blocks."""
    logits_BV: Tensor

    def find_row(self, chunk: Chunk) -> int | None:
        row, computed, preemptions = self.rows.get(chunk.sequence, (0, None, 0))
        is_same = computed is not None and (computed.start, computed.count) == (chunk.start, chunk.count)
        return row if is_same and preemptions == chunk.sequence.preemptions else None


class AsyncDecoder:
    """Wraps a model runner; at most one step ahead."""

    def __init__(self, runner: ModelRunner, block_manager: BlockManager) -> None:
        self._runner, self._block_manager = runner, block_manager
        self._ahead: _Ahead | None = None

    def forget(self) -> None:
        """Discard what was computed ahead. Required after a failed step."""
        self._ahead = None

    def compute(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `batch.sampled`, [B, V]: those computed ahead, and the others computed now."""
        ahead, self._ahead = self._ahead, None
        rows = [None if ahead is None else ahead.find_row(chunk) for chunk in batch.chunks]
        if ahead is None or all(row is None for row in rows):
            return self._runner.compute(batch, adapters)
        if rows == list(range(len(ahead.rows))):
            return ahead.logits_BV
        known = [row for row in rows if row is not None]
        logits_BV = ahead.logits_BV[torch.tensor(known, device=ahead.logits_BV.device)]
        if None not in rows:
            return logits_BV
        rest = tuple(chunk for row, chunk in zip(rows, batch.chunks, strict=True) if row is None)
        others_BV = self._runner.compute(replace(batch, chunks=rest), adapters)
        old, new = iter(range(len(known))), iter(range(len(known), len(known) + len(others_BV)))
        order = [
            next(new) if row is None else next(old) for row, chunk in zip(rows, batch.chunks, strict=True) if chunk.samples
        ]
        return torch.cat([logits_BV, others_BV])[torch.tensor(order, device=logits_BV.device)]

    def run_ahead(self, batch: Batch, tokens_B: Tensor, adapters: Mapping[str, EngineAdapter]) -> None:
        """Launch the step after `batch`, which has sampled these tokens. May overwrite the logits of `batch`."""
        rows, chunks = [], []
        for row, sequence in enumerate(batch.sampled):
            length = len(sequence.tokens)
            continues = sequence.state is SequenceState.RUNNING and length + 1 < sequence.max_length
            if continues and self._block_manager.grow(sequence, length + 1):
                rows.append(row)
                chunks.append(Chunk(sequence, length, 1, True))
        if not chunks:
            return
        if len(rows) < len(tokens_B):
            tokens_B = tokens_B[torch.tensor(rows, device=tokens_B.device)]
        # Tokens below 0 belong to sequences that have failed.
        logits_BV = self._runner.compute_next(chunks, tokens_B.clamp(min=0), adapters)
        if logits_BV is not None:
            by_sequence = {chunk.sequence: (row, chunk, chunk.sequence.preemptions) for row, chunk in enumerate(chunks)}
            self._ahead = _Ahead(by_sequence, logits_BV)
