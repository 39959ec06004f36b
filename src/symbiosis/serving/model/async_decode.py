"""Launches the next decode step before the scheduler has scheduled it.

While a GPU computes a step, its sampled tokens exist only in device memory, and nearly every sequence continues from them.
So the next step is launched at once, and the GPU does not wait for Python. When the scheduler schedules that step, the
logits computed ahead are used. Rows of sequences that finished meanwhile are discarded: later writes to their blocks follow
in stream order. Reference: a model runner alone.

B = rows that sample a token, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.scheduling.batch import Batch, Chunk
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class _Ahead:
    chunks: Seq[Chunk]
    """Of one token each, by row."""
    preemptions: Seq[int]
    """Of each sequence then: a preemption replaces its blocks."""
    logits_BV: Tensor

    def equals(self, chunks: Seq[Chunk]) -> bool:
        """Whether these chunks, in this order, were computed."""
        if len(chunks) != len(self.chunks):
            return False
        for chunk, computed, preemptions in zip(chunks, self.chunks, self.preemptions, strict=True):
            sequence = computed.sequence
            if chunk.sequence is not sequence or chunk.start != computed.start or chunk.count != 1:
                return False
            if sequence.preemptions != preemptions:
                return False
        return True

    def find_rows(self, chunks: Seq[Chunk]) -> list[int | None]:
        """The row of each chunk; None if it was not computed."""
        rows = {chunk.sequence: row for row, chunk in enumerate(self.chunks)}
        return [self._check_row(rows.get(chunk.sequence), chunk) for chunk in chunks]

    def _check_row(self, row: int | None, chunk: Chunk) -> int | None:
        if row is None or (self.chunks[row].start, 1) != (chunk.start, chunk.count):
            return None
        return row if self.preemptions[row] == chunk.sequence.preemptions else None


class AsyncDecoder:
    """Wraps a model runner; at most one step ahead."""

    def __init__(
        self, runner: ModelRunner, block_manager: BlockManager, before_write: Callable[[], None] = lambda: None
    ) -> None:
        """`before_write` is called when blocks were allocated, before they are written."""
        self._runner, self._block_manager, self._before_write = runner, block_manager, before_write
        self._ahead: _Ahead | None = None

    def forget(self) -> None:
        """Discard what was computed ahead. Required after a failed step."""
        self._ahead = None

    def compute(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `batch.sampled`, [B, V]: those computed ahead, and the others computed now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._runner.compute(batch, adapters)
        if ahead.equals(batch.chunks):
            return ahead.logits_BV
        rows = ahead.find_rows(batch.chunks)
        if all(row is None for row in rows):
            return self._runner.compute(batch, adapters)
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
        running, block_size, grow = SequenceState.RUNNING, self._block_manager.block_size, self._block_manager.grow
        for row, sequence in enumerate(batch.sampled):
            length = len(sequence.tokens)
            if sequence.state is not running or length + 1 >= sequence.max_length:
                continue
            if length < len(sequence.block_table) * block_size or grow(sequence, length + 1):
                rows.append(row)
                chunks.append(Chunk(sequence, length, 1, True))
        if not chunks:
            return
        if len(rows) < len(tokens_B):
            tokens_B = tokens_B[torch.tensor(rows, device=tokens_B.device)]
        self._before_write()
        # Tokens below 0 belong to sequences that have failed.
        logits_BV = self._runner.compute_next(chunks, tokens_B.clamp(min=0), adapters)
        if logits_BV is not None:
            self._ahead = _Ahead(chunks, [chunk.sequence.preemptions for chunk in chunks], logits_BV)
