"""Passes in which every sequence has one row, as CUDA graphs: one launch instead of a thousand.

A graph is made for a number of rows when a pass of about that size comes for
the first time; rows that are left over are nobody's. What changes from pass to
pass (tokens, places, pages, adapters) lies in memory that the graph reads, so
one graph serves every mixture of adapters whose changes are all low-rank, and
another one passes without any. Plain reference: `Runner.compute` without graphs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.gpu.cuda_graph import captured
from symbiosis.kernels.tiles import Span, Tiles
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_weights import AdapterSegment
from symbiosis.serving.model.paged_attention import PagedKVCache

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class _Graph:
    """A pass of a fixed number of rows, and the memory it reads."""

    inputs_2B: Tensor
    """Tokens and places."""
    now: Any
    tiles: Tiles | None
    replay: Callable[[], Tensor]
    """Returns the logits, which are there until the next time."""


class DecodeGraphs:
    """Graphs of one model; they share the memory between their kernels, since one runs at a time."""

    def __init__(self, model: PreTrainedModel, memory: PagedKVCache, bank: ActiveAdapters, max_pages: int) -> None:
        self._model, self._memory, self._bank, self._max_pages = model, memory, bank, max_pages
        self._graphs: dict[tuple[int, int, int], _Graph] = {}  # by rows, largest rank and rows of a tile
        self._failed: set[tuple[int, int, int]] = set()
        self._pool: Any = None
        self._streams: tuple[Any, Any] | None = None  # one pair for all graphs: torch hands out a few, and others have theirs

    def compute(self, ids: Sequence[int] | Tensor, spans: Sequence[Span], segments: Sequence[AdapterSegment]) -> Tensor | None:
        """The logits of all rows, one a sequence, until the next call; None if this must be computed in the usual way."""
        from symbiosis.kernels.lora.shrink_expand import tile_rows

        size = next((size for size in _SIZES if size >= len(ids)), None)
        if size is None or any(len(span.pages) > self._max_pages for span in spans):
            return None
        rank = self._bank.table.max_rank if segments and self._bank.table is not None else 0
        kind = (size, rank, tile_rows(size, len(segments), rank) if rank else 0)
        if kind in self._failed:
            return None
        graph = self._graphs.get(kind) or self._added(kind)
        if graph is None:
            return None
        spare = [0] * (size - len(ids))
        known = [] if isinstance(ids, Tensor) else [[*ids, *spare]]
        rows = torch.tensor([*known, [*(span.before for span in spans), *spare]])
        rows = rows.pin_memory() if graph.inputs_2B.is_cuda else rows
        graph.inputs_2B[-len(rows) :].copy_(rows, non_blocking=True)
        if isinstance(ids, Tensor):
            graph.inputs_2B[0, : len(ids)].copy_(ids)
        graph.now.fill(spans)
        if graph.tiles is not None:
            graph.tiles.fill(self._bank.slot_segments(segments))
        return graph.replay()[: len(ids)]

    def _added(self, kind: tuple[int, int, int]) -> _Graph | None:
        """A graph of this kind from now on; None if there can be none."""
        size, rank, tile = kind
        try:
            graph = self._make(size, tile)
        except Exception as error:  # noqa: BLE001 - whatever stands in the way of a graph, the usual way is still there
            _log.warning("%d rows of %s cannot be a CUDA graph (%r)", size, type(self._model).__name__, error)
            self._failed.add(kind)
            self._pool = None  # it may be unusable; graphs that have it keep it
            return None
        for old in [key for key in self._graphs if 0 < key[1] < rank]:
            del self._graphs[old]  # ranks only grow. Only now: a pool that no graph has cannot be had by another
        self._graphs[kind] = graph
        return graph

    def _make(self, size: int, tile: int) -> _Graph:
        """`tile` is 0 where there are no adapters."""
        from symbiosis.kernels.lora.shrink_expand import most_tiles
        from symbiosis.kernels.paged_attention import AttentionBatch

        device = self._model.device
        inputs_2B = torch.zeros(2, size, dtype=torch.int64, device=device)
        now = AttentionBatch(rows=size, max_pages=self._max_pages, page_size=self._memory.block_size, device=device)
        now.fill([])
        tiles = Tiles(most_tiles(size, tile), tile, device, reach=size) if tile else None

        def compute() -> Tensor:
            self._memory.use(now)
            self._bank.use_tiles(tiles, size, self._pair()[1] if device.type == "cuda" else None)
            ids_1B, places_1B = inputs_2B[:1], inputs_2B[1:]
            logits: Tensor = self._model(input_ids=ids_1B, position_ids=places_1B, use_cache=False).logits[0]
            return logits

        return _Graph(inputs_2B, now, tiles, self._captured(compute) if device.type == "cuda" else compute)

    def _pair(self) -> tuple[Any, Any]:
        """A stream to capture on, and one for adapters' products, which fill what the layers' own leave free of the GPU.

        Hosted training beside them comes after both.
        """
        if self._streams is None:
            low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
            make = functools.partial(torch.cuda.Stream, self._model.device)
            self._streams = make(priority=high), make(priority=min(low, high + 1))
        return self._streams

    def _captured(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        device = self._model.device
        stream: Any = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):  # nothing can be captured there
            self._pair()[0].wait_stream(stream)
            stream = self._pair()[0]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            try:
                compute()  # kernels are compiled, libraries choose theirs
            finally:  # whatever it raises: what was launched reads memory that is free then
                for each in (stream, self._pair()[1]):
                    each.synchronize()
            graph, logits = captured(compute, self._pool)
        torch.cuda.current_stream(device).wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
