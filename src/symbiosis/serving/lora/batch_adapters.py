"""Adapters active in the current batch; their ops are cached while the set is unchanged.

A batch is one list of rows. Rows of one adapter are contiguous: an `AdapterSegment`. Where GPU kernels run, they compute
LoRA deltas and find the weights of every adapter in the slot table. `lora_ops` computes all other parts, and all parts on
a CPU. A layer without adapters costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from symbiosis.errors import CannotServe
from symbiosis.kernels.tiles import Segment as SlotSegment
from symbiosis.kernels.tiles import Tiles
from symbiosis.serving.lora.lora_ops import AdapterOps, FusedProjection
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter
from symbiosis.serving.lora.slot_table import SlotTable

_CACHED_GROUPS = 4

_Segments: TypeAlias = tuple[AdapterSegment, ...]
_Ops: TypeAlias = dict[tuple[str, ...], AdapterOps]  # by layer


class DeferredDelta:
    """The delta of a product: the shrink starts before the product, the expand adds to its result."""

    def __init__(self, x_RI: Tensor, table: Tensor, lora: Any, bias_O: Tensor | None, side_stream: Any) -> None:
        """`side_stream`, if any, computes the delta concurrently with the product."""
        from symbiosis.kernels.lora.shrink_expand import expand_deferred, shrink

        self._table, self._lora, self._bias_O, self._side_stream = table, lora, bias_O, side_stream
        self._x_RI: Tensor | None = x_RI  # the side stream reads it: the memory must not be reused before the wait
        self._deferred: Any = None
        if side_stream is None:
            shrink(x_RI, table, lora)
            return
        self._stream = torch.cuda.current_stream(x_RI.device)
        if lora.few:
            lora.allocate_delta()  # on this stream: the allocator ties memory to a stream
        side_stream.wait_stream(self._stream)
        with torch.cuda.stream(side_stream):
            shrink(x_RI, table, lora, on_other_stream=True)
            if lora.few:
                self._deferred = expand_deferred(table, lora, like=x_RI, base_bias_O=bias_O)

    def resolve(self, y_RO: Tensor) -> Any:
        """Add the delta to the result in place, or return it (`kernels.lora.deferred`) for a kernel that adds it."""
        from symbiosis.kernels.lora.shrink_expand import expand

        if self._side_stream is not None:
            self._stream.wait_stream(self._side_stream)
        self._x_RI = None
        if self._deferred is None:
            expand(y_RO, self._table, self._lora, self._bias_O)
        return self._deferred

    def add(self, y_RO: Tensor) -> None:
        """Add the delta to the result in place."""
        from symbiosis.kernels.lora.deferred import add_deferred

        deferred = self.resolve(y_RO)
        if deferred is not None:
            add_deferred(y_RO, deferred, self._lora.members)


class ActiveAdapters:
    """The adapters of the current batch, as the patched layers see them."""

    def __init__(self, cached_groups: int = _CACHED_GROUPS) -> None:
        """`cached_groups`: most lists of segments whose ops are kept."""
        self._cached_groups = cached_groups
        self.table: SlotTable | None = None
        """Set if GPU kernels compute LoRA deltas."""
        self._row_counts: tuple[int, int] | None = None
        self._tiles: Tiles | None = None
        self._head_tiles: Tiles | None = None
        self._lora_batches: dict[Any, Any] = {}  # kernels' work for this batch
        self._side_stream: Any = None
        # Keys hold adapters, not hashes: a reloaded adapter has the same hash and other addresses.
        self._groups: OrderedDict[_Segments, _Ops] = OrderedDict()
        self._group: tuple[_Segments, _Ops] | None = None
        self._head_group: tuple[_Segments, _Ops] | None = None

    def begin_batch(
        self, segments: Sequence[AdapterSegment], head_segments: Sequence[AdapterSegment], counts: tuple[int, int] | None = None
    ) -> None:
        """Set the segments of the next batch: of all rows, and of those the head reads. `counts` of both, if known."""
        self._group, self._head_group = self._find_group(segments), self._find_group(head_segments)
        self._row_counts = counts if segments else None
        self._tiles = self._head_tiles = self._side_stream = None
        self._lora_batches = {}
        if self.table is not None and segments:
            from symbiosis.kernels.lora.shrink_expand import tile_rows

            num_rows = max(segment.end for segment in segments)
            size, device = tile_rows(num_rows, len(segments), self.table.max_rank), self.table.device
            self._tiles = Tiles.of(self.slot_segments(segments), size, device)
            self._head_tiles = Tiles.of(self.slot_segments(head_segments), size, device) if head_segments else None

    def save(self) -> Any:
        """What layers read of this batch, for `restore`."""
        kernels = (self._tiles, self._head_tiles, self._lora_batches, self._side_stream)
        return self._group, self._head_group, self._row_counts, kernels

    def restore(self, saved: Any) -> None:
        """Let layers read a batch that was begun before, while no adapter of it was evicted."""
        self._group, self._head_group, self._row_counts, kernels = saved
        self._tiles, self._head_tiles, self._lora_batches, self._side_stream = kernels

    def slot_segments(self, segments: Sequence[AdapterSegment]) -> list[SlotSegment]:
        """The segments by slot, for kernels."""
        assert self.table is not None
        return [SlotSegment(self.table.slot_of(s.adapter), s.start, s.end - s.start) for s in segments]

    def use_tiles(
        self, tiles: Tiles | None, rows: int, side_stream: Any = None, head: tuple[Tiles | None, int] | None = None
    ) -> None:
        """Use these tiles for all batches until `begin_batch`: a CUDA graph refills them.

        `side_stream`, if any, computes deltas concurrently with the base layers. `head` are the tiles and the number of the
        rows that the head reads, by default all rows.
        """
        self._group = self._head_group = self._row_counts = None
        self._side_stream = side_stream
        self._tiles, (self._head_tiles, head_rows) = tiles, head or (tiles, rows)
        self._lora_batches = {}
        if tiles is not None:
            self._row_counts = (rows, head_rows)

    def check_rows(self, rows: int, *, is_head: bool) -> None:
        """Raise `CannotServe` if a layer reads other rows than the batch has: segments would not match."""
        if self._row_counts is not None and rows != self._row_counts[is_head]:
            raise CannotServe(
                f"a layer of this model reads {rows} rows of a batch of {self._row_counts[is_head]}: adapters cannot be applied"
            )

    def begin_delta(self, x_RI: Tensor, fused: FusedProjection, *, is_head: bool) -> DeferredDelta | None:
        """Launch the shrink of these layers. None if the kernels have nothing to do."""
        tiles = self._head_tiles if is_head else self._tiles
        if self.table is None or tiles is None:
            return None
        from symbiosis.kernels.lora.shrink_expand import LoraBatch

        key = (tiles, x_RI.shape, tuple(fused.widths))
        lora = self._lora_batches.get(key)
        if lora is None:
            lora = LoraBatch(tiles, x_RI.shape[0], x_RI.shape[1], fused.members, self.table.max_rank)
            self._lora_batches[key] = lora
        return DeferredDelta(x_RI, self.table.columns_of(*fused.paths), lora, fused.bias_O, self._side_stream)

    def _find_group(self, segments: Sequence[AdapterSegment]) -> tuple[_Segments, _Ops] | None:
        if not segments or (self.table is not None and all(each.adapter.decodes_by_table for each in segments)):
            return None  # kernels apply all parts
        key = tuple(segments)
        ops = self._groups.setdefault(key, {})
        self._groups.move_to_end(key)
        if len(self._groups) > self._cached_groups:
            self._groups.popitem(last=False)
        return key, ops

    def forget(self, adapter: EngineAdapter) -> None:
        """Drop cached ops of an adapter that is being evicted. Between batches."""
        self._group = self._head_group = None
        for key in [key for key in self._groups if any(each.adapter is adapter for each in key)]:
            del self._groups[key]

    def ops_at(self, fused: FusedProjection, *, is_head: bool) -> AdapterOps | None:
        """The ops of the current batch at these layers; None if there are none."""
        group = self._head_group if is_head else self._group
        if group is None:
            return None
        segments, ops_by_layer = group
        ops = ops_by_layer.get(fused.paths)
        if ops is None:
            ops = ops_by_layer[fused.paths] = AdapterOps(fused, segments, by_table=self.table is not None)
        return None if ops.is_empty else ops
