"""Batches with prefill as CUDA graphs: chunks of prompts, alone or mixed with decoding sequences.

A graph is captured for numbers of rows and of sequences; a batch runs in the smallest that holds it. All that differs
between batches lies in memory that the graph reads: tokens, positions, spans, block tables, tiles of adapters, the rows
that the head reads. Spare rows belong to no sequence: their keys and values are not stored, and no other row reads them.
Kernels are launched for as many sequences and tiles as the graph holds, and programs without one return at once. Plain
reference: `ModelRunner` without graphs.

R = rows of a batch, S = its sequences, V = vocabulary.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.gpu.graph_cache import GraphCache
from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.block_tables import BlockTables
from symbiosis.kernels.tiles import Tiles
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.model.model_input import ModelInput
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.model.pass_capture import PassCapture

# A pass of few rows is bound by reading weights: spare rows cost nothing. Above, matrix products compute tiles of rows.
_ROWS = (32, 64, *range(128, 513, 64), *range(640, 2049, 128))
_SEQUENCES = (16, 64, 256, 512)
_MAX_SEGMENTS = 64
_MIN_USES = 2  # a capture takes as long as several passes
_MAX_GRAPHS = 128
_MAX_FAILURES = 3  # without a single success, after which captures are not tried again
_log = logging.getLogger("symbiosis")


class GraphSize(NamedTuple):
    """What a graph is captured for."""

    rows: int
    sequences: int
    decodes: bool
    """Whether some of them may have one row."""
    max_rank: int = 0
    """Of adapters; 0 without any."""

    @property
    def tile(self) -> int:
        """Rows of a tile of one adapter."""
        return 16 if self.rows <= 256 else 64

    @property
    def num_segments(self) -> int:
        """Most segments of adapters."""
        return min(self.sequences, _MAX_SEGMENTS)


def choose_size(made: ModelInput, max_rank: int) -> GraphSize | None:
    """The smallest graph that holds a batch; None if it is too large. `max_rank` is that of all adapters."""
    row, sequence = bisect_left(_ROWS, len(made.ids)), bisect_left(_SEQUENCES, len(made.spans))
    if row == len(_ROWS) or sequence == len(_SEQUENCES):
        return None
    rows = _ROWS[row]
    decodes = any(span.count == 1 for span in made.spans)
    size = GraphSize(rows, min(rows, _SEQUENCES[sequence]), decodes, max_rank if made.segments else 0)
    return size if len(made.segments) <= size.num_segments else None


@dataclass(frozen=True, slots=True)
class _Graph:
    """A pass of a fixed size, and the memory it reads."""

    numbers: Tensor
    """Token and position of each row, then the rows that the head reads."""
    attention: AttentionBatch
    tiles: tuple[Tiles, Tiles] | None
    """Of all rows, and of those that the head reads."""
    replay: Callable[[], Tensor]

    def fill(self, made: ModelInput, size: GraphSize) -> None:
        """Write the next batch, in the order of the current stream."""
        host = torch.zeros(self.numbers.shape, dtype=torch.int64, pin_memory=self.numbers.is_cuda)
        parts = host.numpy()
        parts[: len(made.ids)] = made.ids
        parts[size.rows : size.rows + len(made.ids)] = made.positions
        parts[2 * size.rows : 2 * size.rows + len(made.sampled_rows)] = made.sampled_rows
        self.numbers.copy_(host, non_blocking=True)
        self.attention.fill_spans(made.spans)


class PrefillGraphs:
    """Graphs of one model."""

    def __init__(
        self, model: PreTrainedModel, kv_cache: PagedKVCache, adapters: ActiveAdapters, max_blocks: int, capture: PassCapture
    ) -> None:
        self._model, self._kv_cache, self._adapters, self._max_blocks = model, kv_cache, adapters, max_blocks
        self._capture = capture
        self._tables = BlockTables(2 * _SEQUENCES[-1], max_blocks, kv_cache.block_size, model.device)
        self._graphs: GraphCache[GraphSize, _Graph] = GraphCache(_MAX_GRAPHS, _MIN_USES)
        self._logits: dict[int, Tensor] = {}
        """Results, by the number of sequences they hold. Graphs share them."""

    def compute(self, made: ModelInput) -> Tensor | None:
        """The logits of the sampled rows, valid until the next call; None if no graph can compute this batch."""
        table = self._adapters.table
        if not made.reads_tables or (made.segments and table is None):
            return None
        size = choose_size(made, 0 if table is None else table.max_rank)
        if size is None or max(len(span.block_table) for span in made.spans) > self._max_blocks:
            return None
        graph = self._graphs.get(size) or self._add(size)
        if graph is None:
            return None
        graph.fill(made, size)
        if graph.tiles is not None:
            for tiles, segments in zip(graph.tiles, (made.segments, made.head_segments), strict=True):
                tiles.fill(self._adapters.slot_segments(segments))
        return graph.replay()[: len(made.sampled_rows)]

    def _add(self, size: GraphSize) -> _Graph | None:
        """Capture a graph; None if it is not worth it yet, or cannot be captured."""
        has_failed = len(self._graphs.rejected) >= _MAX_FAILURES and not len(self._graphs)
        if has_failed or not self._graphs.admits(size) or not self._capture.has_memory():
            return None
        graph = None
        try:
            graph = self._build(size)
            self._graphs.evict(lambda old: 0 < old.max_rank < size.max_rank)  # ranks only grow
        except Exception as error:  # noqa: BLE001 - the batch runs without a graph then, and reports its own errors
            _log.warning("prefill of %s cannot be captured as a CUDA graph of %s (%r)", type(self._model).__name__, size, error)
        self._graphs.put(size, graph)
        return graph

    def _build(self, size: GraphSize) -> _Graph:
        device, (rows, sequences, decodes, max_rank) = self._model.device, size
        numbers = torch.zeros(2 * rows + sequences, dtype=torch.int64, device=device)
        attention = AttentionBatch(
            rows=rows,
            tables=self._tables,
            decodes=sequences if decodes else 0,
            prefills=sequences,
        )
        attention.fill_spans([])
        tiles = (self._make_tiles(rows, size), self._make_tiles(sequences, size)) if max_rank else None
        all_tiles, head_tiles = (None, None) if tiles is None else tiles

        def compute() -> Tensor:
            self._kv_cache.use(attention)
            self._adapters.use_tiles(all_tiles, rows, self._capture.side_stream, (head_tiles, sequences))
            found = self._model(
                input_ids=numbers[:rows][None],
                position_ids=numbers[rows : 2 * rows][None],
                use_cache=False,
                logits_to_keep=numbers[2 * rows :],
            ).logits[0]
            return self._keep(found)

        return _Graph(numbers, attention, tiles, self._capture.capture(compute))

    def _keep(self, logits_SV: Tensor) -> Tensor:
        """A copy outside of the graphs' memory."""
        sequences = len(logits_SV)
        capacity = _SEQUENCES[bisect_left(_SEQUENCES, sequences)]
        if capacity not in self._logits:  # in the run before the capture
            self._logits[capacity] = logits_SV.new_empty(capacity, logits_SV.shape[1])
        return self._logits[capacity][:sequences].copy_(logits_SV)

    def _make_tiles(self, rows: int, size: GraphSize) -> Tiles:
        full = -(-rows // size.tile)
        return Tiles(full + size.num_segments, size.tile, self._model.device, typical=full)
