"""Rows, lengths and block tables of a batch, as the attention kernels (`paged_attention`) read them from device memory.

R = rows of a batch, B = sequences, P = most blocks of a sequence. A slot is a token's place in the KV cache: block × block
size + offset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from symbiosis.kernels.block_tables import BlockTables
from symbiosis.kernels.tiles import Segment, Span, Tiles

PREFILL_TILE = 64
"""Rows of a tile."""
_SHORT_PREFILL_TILE = 16
"""If no span has more rows."""


class AttentionBatch:
    """The batch of all layers.

    `AttentionBatch(...)` is allocated for `decodes` sequences of one row and `prefills` of several. `fill` and `fill_spans`
    replace them in place between replays of a CUDA graph.
    """

    def __init__(self, *, rows: int, tables: BlockTables, decodes: int | None = None, prefills: int = 0) -> None:
        """`decodes` is `rows` by default. Batches share tables if each is used before another one is filled."""
        decodes = rows if decodes is None else decodes
        sequences = decodes + prefills
        assert sequences <= len(tables), (sequences, len(tables))
        self._tables, device = tables, tables.device_BP.device
        shapes = ((3, sequences), (rows,))
        # each part starts at a multiple of 16 bytes: kernels are compiled for that
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in shapes]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._device = self._host.to(device)
        self.spans_3B, self.slots_R = _cut(self._device, shapes, sizes)
        self._spans, self._slots = (part.numpy() for part in _cut(self._host, shapes, sizes))
        self.num_sequences = sequences
        self.num_decodes = decodes
        """The first `num_decodes` sequences have one row each, or none."""
        self.tiles: Tiles | None = None
        """Rows of the others."""
        if prefills:
            self.tiles = Tiles(rows // PREFILL_TILE + prefills, PREFILL_TILE, device)

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, device: torch.device | str) -> AttentionBatch:
        """Exactly as large as these spans need, of one or more rows each."""
        ordered = sorted(spans, key=lambda span: span.count > 1)
        rows = max((span.start + span.count for span in spans), default=0)
        tables = BlockTables.of([span.block_table for span in ordered], block_size, device)
        batch = cls(rows=rows, tables=tables, decodes=len(spans))
        batch.num_decodes = sum(span.count == 1 for span in spans)
        prefills = [Segment(b, span.start, span.count) for b, span in enumerate(ordered) if span.count > 1]
        if prefills:
            longest = max(segment.count for segment in prefills)
            tile = _SHORT_PREFILL_TILE if longest <= _SHORT_PREFILL_TILE else PREFILL_TILE
            batch.tiles = Tiles.of(prefills, tile, device)
        batch._set(ordered)
        return batch

    @property
    def block_table_BP(self) -> Tensor:
        return self._tables.device_BP

    @property
    def block_size(self) -> int:
        return self._tables.block_size

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self._tables.longest

    def fill(self, before: Sequence[int], block_tables: Sequence[Sequence[int]]) -> None:
        """Write the next batch, in the order of the current stream: sequence b is row b. The output of other rows is zero.

        `before` are the tokens of each that are in the KV cache already. Only what has changed in block tables is copied.
        """
        count = len(before)
        if count > self.num_sequences:
            raise ValueError(f"{count} sequences do not fit: expected at most {self.num_sequences}, of one row each")
        self._tables.update(range(count), block_tables)
        self._spans[0] = np.arange(self._spans.shape[1])
        self._spans[1, :count], self._spans[1, count:] = 1, 0
        self._spans[2, :count], self._spans[2, count:] = before, 0
        block, offset = np.divmod(self._spans[2, :count], self.block_size)
        self._slots[:count] = self._tables.host_BP[np.arange(count), block] * self.block_size + offset
        self._slots[count:] = -1
        self._copy()

    def fill_spans(self, spans: Sequence[Span]) -> None:
        """Write the next batch of spans of any number of rows. The output of other rows is undefined."""
        assert self.tiles is not None, "no prefills"
        first, decodes = self.num_decodes, [span for span in spans if span.count == 1]
        prefills = [span for span in spans if span.count > 1]
        if len(decodes) > first or first + len(prefills) > self.num_sequences:
            expected = f"expected at most {first} of one row and {self.num_sequences - first} of several"
            raise ValueError(f"{len(decodes)} + {len(prefills)} spans do not fit: {expected}")
        lines, ordered = [*range(len(decodes)), *range(first, first + len(prefills))], [*decodes, *prefills]
        self._tables.update(lines, [span.block_table for span in ordered])
        self._spans[:] = ((0,), (-1,), (0,))  # no row at all: row 0 belongs to another sequence
        write_spans(ordered, lines, self._tables.host_BP, self.block_size, self._spans, self._slots)
        self._copy()
        self.tiles.fill([Segment(first + b, span.start, span.count) for b, span in enumerate(prefills)])

    def _set(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        write_spans(spans, range(len(spans)), self._tables.host_BP, self.block_size, self._spans, self._slots)
        self._copy()

    def _copy(self) -> None:
        self._device.copy_(_pinned(self._host, self._device), non_blocking=True)


def write_spans(
    spans: Sequence[Span],
    lines: Sequence[int],
    block_table_BP: np.ndarray,
    block_size: int,
    spans_3B: np.ndarray,
    slots_R: np.ndarray,
) -> None:
    """Write the start, rows and earlier tokens of each span to its line, and the slots of all rows; -1: rows of no span."""
    slots_R[:] = -1
    if not spans:
        return
    numbers_3S = np.array([(span.start, span.count, span.before) for span in spans], dtype=np.int64).T
    spans_3B[:, lines] = numbers_3S
    start, count, before = numbers_3S
    own = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # rows, counted from the first of their span
    block, offset = np.divmod(np.repeat(before, count) + own, block_size)
    slots_R[np.repeat(start, count) + own] = block_table_BP[np.repeat(lines, count), block] * block_size + offset


def _pinned(host: Tensor, target: Tensor) -> Tensor:
    """A copy that is pinned, if the target is on a GPU: the next batch may be written before this one is copied."""
    return host.pin_memory() if target.is_cuda else host


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(flat[start : start + math.prod(shape)].view(shape) for shape, start in zip(shapes, starts, strict=False))
