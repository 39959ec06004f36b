"""Which adapters are at work in the pass that runs: worked out once, used by all layers and again while the company stays.

A pass is one list of rows; rows of one adapter lie together as a `AdapterSegment`.
Where there are kernels, low-rank changes are theirs: they find the weights of
every adapter by a table. The rest, and all of it elsewhere, is in `effects`. No
adapter on a layer, no work there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from symbiosis.errors import CannotServe
from symbiosis.kernels.tiles import Segment as SlotSegment
from symbiosis.kernels.tiles import Tiles
from symbiosis.serving.lora.lora_ops import AdapterGroup, AdapterOps, FusedProjection
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter

_KEEP = 4  # companies


class SlotWeights(Protocol):
    """Where kernels find the low-rank weights of every adapter."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int:
        """The largest in it, rounded up to what kernels take."""

    def of(self, *paths: str) -> Tensor:
        """The part for these layers, int64 [slots, paths, 4]."""

    def slot(self, adapter: EngineAdapter) -> int:
        """Its line."""


class DeferredDelta:
    """What adapters do to the result of a product: begun before it, due after it."""

    def __init__(self, x_RI: Tensor, table: Tensor, work: Any, bias_O: Tensor | None, beside: Any) -> None:
        """`beside` is a stream on which it is computed while the product is, if any."""
        from symbiosis.kernels.lora.shrink_expand import expand_deferred, shrink

        self._table, self._work, self._bias_O, self._beside = table, work, bias_O, beside
        self._rows: Tensor | None = x_RI  # read on another stream: nothing else may lie there until that is waited for
        self._kept: Any = None
        if beside is None:
            shrink(x_RI, table, work)
            return
        self._here = torch.cuda.current_stream(x_RI.device)
        if work.few:
            work.allocate_delta()  # here: memory belongs to a stream
        beside.wait_stream(self._here)
        with torch.cuda.stream(beside):
            shrink(x_RI, table, work, on_other_stream=True)
            if work.few:
                self._kept = expand_deferred(table, work, like=x_RI, base_bias_O=bias_O)

    def settle(self, y_RO: Tensor) -> Any:
        """Add it to the result, in place, or return it (`kernels.kept`) if it was kept: for a kernel that adds it by itself."""
        from symbiosis.kernels.lora.shrink_expand import expand

        if self._beside is not None:
            self._here.wait_stream(self._beside)
        self._rows = None
        if self._kept is None:
            expand(y_RO, self._table, self._work, self._bias_O)
        return self._kept

    def add(self, y_RO: Tensor) -> None:
        """Add it to the result, in place."""
        from symbiosis.kernels.lora.deferred import add_deferred

        kept = self.settle(y_RO)
        if kept is not None:
            add_deferred(y_RO, kept, self._work.members)


class ActiveAdapters:
    """Which adapters are at work in the pass that runs."""

    def __init__(self) -> None:
        self.table: SlotWeights | None = None
        """Of adapters' low-rank weights on linear layers, if kernels compute those."""
        self._counts: tuple[int, int] | None = None
        self._tiles: Tiles | None = None
        self._head_tiles: Tiles | None = None
        self._works: dict[Any, Any] = {}  # of kernels, for this pass
        self._beside: Any = None
        # by the adapters themselves: one that left and came back has the same hash and lies elsewhere
        self._companies: OrderedDict[tuple[tuple[EngineAdapter, int, int], ...], AdapterGroup] = OrderedDict()
        self._rows: AdapterGroup | None = None
        self._logits: AdapterGroup | None = None

    def begin(
        self, segments: Sequence[AdapterSegment], logits: Sequence[AdapterSegment], counts: tuple[int, int] | None = None
    ) -> None:
        """The segments of the next pass's rows, and of the rows that the head sees. `counts` of these in all, if known."""
        self._rows, self._logits = self._company(segments), self._company(logits)
        self._counts = counts if segments else None
        self._tiles = self._head_tiles = self._beside = None
        self._works = {}
        if self.table is not None and segments:
            from symbiosis.kernels.lora.shrink_expand import tile_rows

            most = max(segment.end for segment in segments)
            size, device = tile_rows(most, len(segments), self.table.rank), self.table.device
            self._tiles = Tiles.of(self.by_slot(segments), size, device)
            self._head_tiles = Tiles.of(self.by_slot(logits), size, device) if logits else None

    def by_slot(self, segments: Sequence[AdapterSegment]) -> list[SlotSegment]:
        """The same for kernels."""
        assert self.table is not None
        return [SlotSegment(self.table.slot(s.adapter), s.start, s.end - s.start) for s in segments]

    def use(self, tiles: Tiles | None, rows: int, beside: Any = None) -> None:
        """Tiles that are filled again and again, of so many rows, all of which the head sees; for all passes until `begin`.

        `beside` is a stream on which adapters' products are computed while the layers' own are.
        """
        self._rows = self._logits = self._counts = None
        self._beside = beside
        self._tiles = self._head_tiles = tiles
        self._works = {}
        if tiles is not None:
            self._counts = (rows, rows)

    def check(self, rows: int, *, of_head: bool) -> None:
        """Raise `CannotServe` if a layer sees other rows than those of the pass: nobody knows whose they are then."""
        if self._counts is not None and rows != self._counts[of_head]:
            raise CannotServe(
                f"a layer of this model sees {rows} rows of a pass of {self._counts[of_head]}: adapters cannot be applied"
            )

    def begin_change(self, x_RI: Tensor, together: FusedProjection, *, of_head: bool) -> DeferredDelta | None:
        """What kernels do to the result of these layers, side by side. None if nothing.

        What needs only their input is launched now.
        """
        tiles = self._head_tiles if of_head else self._tiles
        if self.table is None or tiles is None:
            return None
        from symbiosis.kernels.lora.shrink_expand import LoraBatch

        key = (tiles, x_RI.shape, tuple(together.widths))
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = LoraBatch(tiles, x_RI.shape[0], x_RI.shape[1], together.members, self.table.rank)
        return DeferredDelta(x_RI, self.table.of(*together.paths), work, together.bias_O, self._beside)

    def _company(self, segments: Sequence[AdapterSegment]) -> AdapterGroup | None:
        if not segments:
            return None
        key = tuple((s.adapter, s.start, s.end) for s in segments)
        company = self._companies.get(key)
        if company is None:
            company = self._companies[key] = AdapterGroup(list(segments))
            if len(self._companies) > _KEEP:
                self._companies.popitem(last=False)
        self._companies.move_to_end(key)
        return company

    def forget(self, adapter: EngineAdapter) -> None:
        """Keep nothing of an adapter whose memory is about to be another's. Between passes."""
        self._rows = self._logits = None
        for key in [key for key in self._companies if any(each[0] is adapter for each in key)]:
            del self._companies[key]

    def effect(self, together: FusedProjection, *, of_head: bool) -> AdapterOps | None:
        """What happens at these layers now; None if nothing does."""
        company = self._logits if of_head else self._rows
        if company is None:
            return None
        effect = company.effects.get(together.paths)
        if effect is None:
            effect = company.effects[together.paths] = AdapterOps(together, company, by_table=self.table is not None)
        return None if effect.is_nothing else effect
