"""Decode batches, in which every sequence has one row, as CUDA graphs: one launch instead of a thousand.

Batches with prefill have graphs of their own (`prefill_graphs`).

A graph is captured for a number of rows when a batch of about that size runs for the first time; its spare rows belong
to no sequence. Tokens, positions, block tables and adapters lie in memory that the graph reads. So one graph serves
every mixture of LoRA adapters, and another one batches without adapters. Plain reference: `ModelRunner` without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.gpu.graph_cache import GraphCache
from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.block_tables import BlockTables
from symbiosis.kernels.tiles import Tiles
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_weights import AdapterSegment
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.model.pass_capture import PassCapture

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_MAX_GRAPHS = 1024  # more than there are sizes, tile sizes and ranks
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class _Graph:
    """A decode step of a fixed number of rows, and the memory it reads."""

    ids_1B: Tensor
    attention: AttentionBatch
    tiles: Tiles | None
    replay: Callable[[], Tensor]
    """Returns the logits, which the next replay overwrites."""


class DecodeGraphs:
    """Graphs of one model."""

    def __init__(
        self, model: PreTrainedModel, kv_cache: PagedKVCache, adapters: ActiveAdapters, max_blocks: int, capture: PassCapture
    ) -> None:
        self._model, self._kv_cache, self._adapters, self._max_blocks = model, kv_cache, adapters, max_blocks
        self._capture = capture
        self._tables = BlockTables(_SIZES[-1], max_blocks, kv_cache.block_size, model.device)
        self._graphs: GraphCache[tuple[int, int, int], _Graph] = GraphCache(
            _MAX_GRAPHS
        )  # by rows, largest rank and rows of a tile

    def compute(
        self,
        ids: Sequence[int] | Tensor,
        before: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        segments: Sequence[AdapterSegment],
    ) -> Tensor | None:
        """The logits of all rows, one a sequence, valid until the next call; None if no graph can compute this batch.

        `before` are the tokens of each sequence that are in the KV cache already.
        """
        from symbiosis.kernels.lora.shrink_expand import tile_rows

        size = next((size for size in _SIZES if size >= len(ids)), None)
        if size is None or max(map(len, block_tables)) > self._max_blocks:
            return None
        max_rank = self._adapters.table.max_rank if segments and self._adapters.table is not None else 0
        key = (size, max_rank, tile_rows(size, len(segments), max_rank) if max_rank else 0)
        graph = self._graphs.get(key) or self._add(key)
        if graph is None:
            return None
        if not isinstance(ids, Tensor):
            ids = torch.tensor(ids, pin_memory=graph.ids_1B.is_cuda)
        graph.ids_1B[0, : len(ids)].copy_(ids, non_blocking=True)
        graph.attention.fill(before, block_tables)
        if graph.tiles is not None:
            graph.tiles.fill(self._adapters.slot_segments(segments))
        return graph.replay()[: len(ids)]

    def _add(self, key: tuple[int, int, int]) -> _Graph | None:
        """Capture a graph; None if this key cannot be captured."""
        if not self._graphs.admits(key):
            return None
        size, max_rank, tile = key
        graph = None
        try:
            graph = self._build(size, tile)
            self._graphs.evict(lambda old: 0 < old[1] < max_rank)  # ranks only grow
        except Exception as error:  # noqa: BLE001 - the batch runs without a graph then, and reports its own errors
            _log.warning("%d rows of %s cannot be captured as a CUDA graph (%r)", size, type(self._model).__name__, error)
        self._graphs.put(key, graph)
        return graph

    def _build(self, size: int, tile: int) -> _Graph:
        """`tile` is 0 without adapters."""
        from symbiosis.kernels.lora.shrink_expand import max_tiles

        device = self._model.device
        ids_1B = torch.zeros(1, size, dtype=torch.int64, device=device)
        attention = AttentionBatch(rows=size, tables=self._tables)
        attention.fill([], [])
        tiles = Tiles(max_tiles(size, tile), tile, device, reach=size) if tile else None

        def compute() -> Tensor:
            self._kv_cache.use(attention)
            self._adapters.use_tiles(tiles, size, self._capture.side_stream)
            positions_1B = attention.spans_3B[2:].long()
            logits: Tensor = self._model(input_ids=ids_1B, position_ids=positions_1B, use_cache=False).logits[0]
            return logits

        return _Graph(ids_1B, attention, tiles, self._capture.capture(compute))
