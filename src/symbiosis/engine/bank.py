"""What the adapters of a pass do to each layer: worked out once, used by all layers and again while the company stays.

A pass is one list of rows; rows of one adapter lie together as a `Segment`.
Weights are never gathered per row: equal ranks with few rows each are one
batched product over stacked weights, anything else one product per adapter.
Where there are kernels, low-rank changes are theirs: they find the weights of
every adapter by a table. No adapter on a layer, no work there.

R = rows, I / O = input and output width, N = adapters, M = most rows of one of them, r = rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.tiles import Segment as SlotSegment
from symbiosis.kernels.tiles import Tiles

_FEW_ROWS = 16
_KEEP = 4  # companies
_KEEP_STACKS = 2  # of one layer: each is as large as its adapters there


@dataclass(frozen=True, slots=True, eq=False)
class Low:
    """A low-rank change of a layer as the engine computes it; `b_Or` has the scale in it.

    On a GPU both are contiguous, as kernels want them. On a CPU their transposes
    are: its products take up to twice as long the other way round.
    """

    a_rI: Tensor
    b_Or: Tensor
    bias_O: Tensor | None = None
    stretch_O: Tensor | None = None
    """DoRA: the whole product, without the layer's own bias, times this."""
    of_embedding: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """IA3: inputs or outputs times a vector."""

    vector: Tensor
    of_input: bool


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A trained weight in the place of the layer's; of an embedding [V, D]."""

    weight_OI: Tensor
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of an embedding, or of a head, are the adapter's own."""

    ids: Tensor
    rows_TD: Tensor


Part = Low | Scale | Own | Rows


@dataclass(frozen=True, slots=True, eq=False)
class Virtual:
    """Tokens in front of every prompt: of prompt tuning by their embeddings, of prefix tuning by keys and values."""

    count: int
    embeddings_TD: Tensor | None = None
    keys_LTKD: Tensor | None = None
    values_LTKD: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An adapter in the engine's dtype on its device: what it does, by the path of a layer."""

    hash: str
    parts: Mapping[str, tuple[Part, ...]]
    virtual: Virtual | None = None
    decodes_by_table: bool = field(init=False)
    """Whether kernels do all that it does to a row that decodes."""

    def __post_init__(self) -> None:
        by_table = all(is_in_table(part) for parts in self.parts.values() for part in parts)
        object.__setattr__(self, "decodes_by_table", by_table)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one adapter."""

    adapter: Loaded
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Few rows of each of several adapters, as one batch. The same for all layers."""

    rows_NM: Tensor
    """Which rows; where an adapter has fewer than M, its last one again."""
    real: Tensor | None
    """Which of the N × M count; None: all."""
    target: Tensor
    """The rows of those."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> _Layout:
        most = max(s.end - s.start for s in segments)
        rows = torch.tensor([[min(s.start + i, s.end - 1) for i in range(most)] for s in segments])
        real = torch.tensor([n * most + i for n, s in enumerate(segments) for i in range(s.end - s.start)])
        target = rows.flatten()[real].to(device)
        return cls(rows.to(device), None if len(real) == rows.numel() else real.to(device), target)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Low-rank changes of one layer by several adapters of equal rank."""

    a_NIr: Tensor
    b_NrO: Tensor

    def add(self, x_RI: Tensor, y_RO: Tensor, layout: _Layout) -> None:
        low = torch.bmm(x_RI[layout.rows_NM], self.a_NIr)
        change = torch.bmm(low, self.b_NrO).flatten(0, 1)
        y_RO.index_add_(0, layout.target, change if layout.real is None else change[layout.real])


class Together:
    """Layers that read the same rows and lie next to each other in memory: one matrix. Often a single layer."""

    def __init__(self, paths: Sequence[str], widths: Sequence[int], weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.paths, self.widths, self.weight_OI, self.bias_O = tuple(paths), list(widths), weight_OI, bias_O
        self._seen: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}

    @cached_property
    def members(self) -> Any:
        """For kernels."""
        from symbiosis.kernels.low_rank import Members

        return Members(self.widths, self.weight_OI.device)

    def take(self, path: str, x: Tensor) -> Tensor | None:
        """This layer's result for the very same rows, if another has computed it."""
        found = self._waiting.pop(path, None) if self._seen is x else None
        if found is not None and not self._waiting:
            self._seen = None
        return found

    def keep(self, x: Tensor, path: str, results: Sequence[Tensor]) -> Tensor:
        """The result for one layer; those for the others wait until they are asked for."""
        if len(results) == 1:
            return results[0]
        self._seen, self._waiting = x, dict(zip(self.paths, results, strict=True))
        return self._waiting.pop(path)


class Stacks:
    """Stacked weights, kept while the same adapters are at work on the same layer."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[tuple[Loaded, ...], _Stack]] = {}

    def of(self, path: str, few: Sequence[tuple[Segment, Low]]) -> _Stack:
        key, kept = tuple(s.adapter for s, _ in few), self._kept.setdefault(path, OrderedDict())
        stack = kept.get(key)
        if stack is None:
            stack = kept[key] = _Stack(torch.stack([low.a_rI.T for _, low in few]), torch.stack([low.b_Or.T for _, low in few]))
            if len(kept) > _KEEP_STACKS:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return stack

    def forget(self, adapter: Loaded) -> None:
        for kept in self._kept.values():
            for key in [key for key in kept if adapter in key]:
                del kept[key]


class Table(Protocol):
    """Where kernels find the low-rank weights of every adapter."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int:
        """The largest in it, rounded up to what kernels take."""

    def of(self, *paths: str) -> Tensor:
        """The part for these layers, int64 [slots, paths, 4]."""

    def slot(self, adapter: Loaded) -> int:
        """Its line."""


class Company:
    """The segments of a pass, and what follows from them, layer by layer."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.effects: dict[str, Effect] = {}
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def layout(self, segments: Sequence[Segment], device: torch.device) -> _Layout:
        key = tuple(s.start for s in segments)
        if key not in self._layouts:
            self._layouts[key] = _Layout.of(segments, device)
        return self._layouts[key]


class Effect:
    """What the adapters of one company do to one layer."""

    def __init__(self, path: str, company: Company, stacks: Stacks, *, by_table: bool) -> None:
        found = [
            (s, part)
            for s in company.segments
            for part in s.adapter.parts.get(path, ())
            if not (by_table and is_in_table(part))
        ]
        self.scaled_inputs = [(slice(s.start, s.end), p.vector) for s, p in found if isinstance(p, Scale) and p.of_input]
        self._scaled = [(slice(s.start, s.end), p.vector) for s, p in found if isinstance(p, Scale) and not p.of_input]
        self._own = [(slice(s.start, s.end), p) for s, p in found if isinstance(p, Own)]
        self._rows = [(slice(s.start, s.end), p) for s, p in found if isinstance(p, Rows)]
        self._all_low = [(slice(s.start, s.end), p) for s, p in found if isinstance(p, Low)]
        plain = [(s, p) for s, p in found if isinstance(p, Low) and p.stretch_O is None and p.bias_O is None]
        self._alone = [(slice(s.start, s.end), p) for s, p in found if isinstance(p, Low) and (s, p) not in plain]
        self._batched: list[tuple[_Stack, _Layout]] = []
        for rank in {p.a_rI.shape[0] for _, p in plain}:
            same = [(s, p) for s, p in plain if p.a_rI.shape[0] == rank]
            few = [(s, p) for s, p in same if s.end - s.start <= _FEW_ROWS]
            if len(few) > 1:
                layout = company.layout([s for s, _ in few], few[0][1].a_rI.device)
                self._batched.append((stacks.of(path, few), layout))
            self._alone += [(slice(s.start, s.end), p) for s, p in same if len(few) == 1 or (s, p) not in few]
        self.is_nothing = not found

    def embedded(self, ids_R: Tensor, y_RD: Tensor) -> None:
        """An embedding's result with every adapter's change, in place."""
        for rows, own in self._own:
            y_RD[rows] = F.embedding(ids_R[rows], own.weight_OI)
        for rows, low in self._all_low:
            y_RD[rows] += F.embedding(ids_R[rows], low.a_rI.T) @ low.b_Or.T
        for rows, part in self._rows:
            hits = ids_R[rows][:, None] == part.ids[None, :]
            y_RD[rows] = torch.where(hits.any(1)[:, None], part.rows_TD[hits.int().argmax(1)], y_RD[rows])

    def before(self, x_RI: Tensor) -> Tensor:
        """The rows as the layer is to see them."""
        if not self.scaled_inputs:
            return x_RI
        x_RI = x_RI.clone()
        for rows, vector in self.scaled_inputs:
            x_RI[rows] *= vector
        return x_RI

    def after(self, x_RI: Tensor, y_RO: Tensor, own_bias: Tensor | None) -> Tensor:
        """The layer's result with every adapter's change; `x_RI` are the rows it saw. May write to `y_RO`."""
        for rows, own in self._own:
            y_RO[rows] = F.linear(x_RI[rows], own.weight_OI, own.bias_O)
        for rows, part in self._rows:
            y_RO[rows, :].index_copy_(1, part.ids, x_RI[rows] @ part.rows_TD.T)
        for rows, low in self._alone:
            _change(x_RI[rows], y_RO[rows], low, own_bias)
        for stack, layout in self._batched:
            stack.add(x_RI, y_RO, layout)
        for rows, vector in self._scaled:
            y_RO[rows] *= vector
        return y_RO


def _change(x: Tensor, y: Tensor, low: Low, own_bias: Tensor | None) -> None:
    """One adapter's rows, in place: y is a view."""
    if low.stretch_O is not None:
        if own_bias is not None:
            y -= own_bias
        y.addmm_(x @ low.a_rI.T, low.b_Or.T).mul_(low.stretch_O)
        if own_bias is not None:
            y += own_bias
    else:
        y.addmm_(x @ low.a_rI.T, low.b_Or.T)
    if low.bias_O is not None:
        y += low.bias_O


def is_in_table(part: Part) -> bool:
    """Whether kernels do all of it."""
    return isinstance(part, Low) and part.bias_O is None and not part.of_embedding


class Bank:
    """Which adapters are at work in the pass that runs."""

    def __init__(self) -> None:
        self.table: Table | None = None
        """Of adapters' low-rank weights on linear layers, if kernels compute those."""
        self._tiles: Tiles | None = None
        self._head_tiles: Tiles | None = None
        # by the adapters themselves: one that left and came back has the same hash and lies elsewhere
        self._companies: OrderedDict[tuple[tuple[Loaded, int, int], ...], Company] = OrderedDict()
        self._stacks = Stacks()
        self._rows: Company | None = None
        self._logits: Company | None = None

    def begin(self, segments: Sequence[Segment], logits: Sequence[Segment], rows: int = 0) -> None:
        """The segments of the next pass's rows, `rows` in all, and of the rows that the head sees."""
        self._rows, self._logits = self._company(segments), self._company(logits)
        self._tiles = self._head_tiles = None
        if self.table is not None and segments:
            from symbiosis.kernels.low_rank import tile_rows

            size, device = tile_rows(rows), self.table.device
            self._tiles = Tiles.of(self.by_slot(segments), size, device)
            self._head_tiles = Tiles.of(self.by_slot(logits), size, device) if logits else None

    def by_slot(self, segments: Sequence[Segment]) -> list[SlotSegment]:
        """The same for kernels."""
        assert self.table is not None
        return [SlotSegment(self.table.slot(s.adapter), s.start, s.end - s.start) for s in segments]

    def use(self, tiles: Tiles | None) -> None:
        """Tiles that are filled again and again, of rows that the head sees all of; for all passes until `begin`."""
        self._rows = self._logits = None
        self._tiles = self._head_tiles = tiles

    def change(self, x_RI: Tensor, y_RO: Tensor, together: Together, own_bias: Tensor | None, *, of_head: bool) -> None:
        """What kernels do to the result of these layers, side by side in y, in place."""
        tiles = self._head_tiles if of_head else self._tiles
        if self.table is None or tiles is None:
            return
        from symbiosis.kernels.low_rank import low_rank

        low_rank(x_RI, y_RO, self.table.of(*together.paths), tiles, together.members, self.table.rank, own_bias)

    def _company(self, segments: Sequence[Segment]) -> Company | None:
        if not segments:
            return None
        key = tuple((s.adapter, s.start, s.end) for s in segments)
        company = self._companies.get(key)
        if company is None:
            company = self._companies[key] = Company(list(segments))
            if len(self._companies) > _KEEP:
                self._companies.popitem(last=False)
        self._companies.move_to_end(key)
        return company

    def forget(self, adapter: Loaded) -> None:
        """Keep nothing of an adapter whose memory is about to be another's. Between passes."""
        self._rows = self._logits = None
        for key in [key for key in self._companies if any(each[0] is adapter for each in key)]:
            del self._companies[key]
        self._stacks.forget(adapter)

    def effect(self, path: str, *, of_head: bool) -> Effect | None:
        """What happens at this layer now; None if nothing does."""
        company = self._logits if of_head else self._rows
        if company is None:
            return None
        effect = company.effects.get(path)
        if effect is None:
            effect = company.effects[path] = Effect(path, company, self._stacks, by_table=self.table is not None)
        return None if effect.is_nothing else effect
