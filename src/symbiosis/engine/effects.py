"""What the adapters of a pass do to layers that read the same rows, by plain products.

Weights are never gathered per row. An adapter with many rows is multiplied by
itself. Adapters with few rows each, which lie next to each other, are a bunch:
their weights side by side are one matrix, and what a row got from the others'
is struck out between the two products. Of four that is a little more work and
a quarter of the calls. Kernels (`kernels.low_rank`) do without.

R = rows, I / O = input and output width, r = rank, B = ranks of a bunch together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.engine.changes import Loaded, Low, Own, Part, Rows, Scale, Segment

_FEW_ROWS = 16
_BUNCH = 4  # adapters
_KEEP = 16  # bunches of one layer: each is as large as its adapters there


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


@dataclass(frozen=True, slots=True)
class _Stack:
    """Low-rank changes by a bunch of adapters to layers that read the same rows."""

    a_IB: Tensor
    """Of all layers side by side."""
    others_RB: Tensor
    """Of each row, what is another adapter's."""
    b_BO: tuple[tuple[slice, slice, Tensor], ...]
    """Of each layer: its columns of the result, its part of B, its weights."""

    def add(self, x_RI: Tensor, y_RO: Tensor) -> None:
        low_RB = (x_RI @ self.a_IB).masked_fill_(self.others_RB, 0.0)
        for columns, part, b_BO in self.b_BO:
            y_RO[:, columns].addmm_(low_RB[:, part], b_BO)


@dataclass(frozen=True, slots=True)
class _Weights:
    a_IB: Tensor
    b_BO: tuple[tuple[slice, slice, Tensor], ...]
    ranks: tuple[tuple[int, ...], ...]
    """Of each layer that anything is done to: the rank of each adapter."""


class Stacks:
    """Weights of bunches, kept while the same adapters are at work on the same layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], OrderedDict[tuple[Loaded, ...], _Weights]] = {}

    def of(self, together: Together, adapters: tuple[Loaded, ...], lows: Sequence[Sequence[Low | None]]) -> _Weights:
        """`lows` by layer and adapter."""
        kept = self._kept.setdefault(together.paths, OrderedDict())
        weights = kept.get(adapters)
        if weights is None:
            weights = kept[adapters] = _weights(together, lows)
            if len(kept) > _KEEP:
                kept.popitem(last=False)
        kept.move_to_end(adapters)
        return weights

    def forget(self, adapter: Loaded) -> None:
        for kept in self._kept.values():
            for key in [key for key in kept if adapter in key]:
                del kept[key]


def _weights(together: Together, lows: Sequence[Sequence[Low | None]]) -> _Weights:
    a: list[Tensor] = []
    b: list[tuple[slice, slice, Tensor]] = []
    ranks: list[tuple[int, ...]] = []
    at = column = 0
    for width, of_layer in zip(together.widths, lows, strict=True):
        real = [low for low in of_layer if low is not None]
        if real:
            size = sum(low.a_rI.shape[0] for low in real)
            a += [low.a_rI.T for low in real]
            b.append((slice(column, column + width), slice(at, at + size), torch.cat([low.b_Or.T for low in real])))
            ranks.append(tuple(0 if low is None else low.a_rI.shape[0] for low in of_layer))
            at += size
        column += width
    return _Weights(torch.cat(a, dim=1), tuple(b), tuple(ranks))


class Company:
    """The segments of a pass, and what follows from them, layer by layer."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.effects: dict[tuple[str, ...], Effect] = {}
        self.bunches = _bunches(segments)
        self._others: dict[tuple[object, ...], Tensor] = {}

    def others(self, bunch: Sequence[Segment], weights: _Weights) -> Tensor:
        """Of each row of a bunch, the columns that are another adapter's. Mostly the same for all layers."""
        key = (bunch[0].start, weights.ranks)
        if key not in self._others:
            owners = [number for ranks in weights.ranks for number, rank in enumerate(ranks) for _ in range(rank)]
            mine = [number for number, segment in enumerate(bunch) for _ in range(segment.end - segment.start)]
            device = weights.a_IB.device
            self._others[key] = torch.tensor(mine, device=device)[:, None] != torch.tensor(owners, device=device)
        return self._others[key]


def _bunches(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Adapters with few rows each that lie next to each other."""
    found: list[tuple[Segment, ...]] = []
    for segment in segments:
        if segment.end - segment.start > _FEW_ROWS:
            continue
        if found and len(found[-1]) < _BUNCH and found[-1][-1].end == segment.start:
            found[-1] = (*found[-1], segment)
        else:
            found.append((segment,))
    return [bunch for bunch in found if len(bunch) > 1]


_Place = tuple[slice, slice]  # rows and columns of the result


class Effect:
    """What the adapters of one company do to layers that read the same rows; their results lie side by side."""

    def __init__(self, together: Together, company: Company, stacks: Stacks, *, by_table: bool) -> None:
        self._bunches: list[tuple[slice, _Stack]] = []
        bunched: set[tuple[int, str]] = set()
        if not by_table:
            for bunch in company.bunches:
                lows = [[_plain(segment.adapter, path) for segment in bunch] for path in together.paths]
                if sum(low is not None for of_layer in lows for low in of_layer) <= len(together.paths):
                    continue  # hardly anybody: each by itself
                weights = stacks.of(together, tuple(segment.adapter for segment in bunch), lows)
                stack = _Stack(weights.a_IB, company.others(bunch, weights), weights.b_BO)
                self._bunches.append((slice(bunch[0].start, bunch[-1].end), stack))
                bunched |= {
                    (segment.start, path)
                    for path, of_layer in zip(together.paths, lows, strict=True)
                    for segment, low in zip(bunch, of_layer, strict=True)
                    if low is not None
                }
        found: list[tuple[_Place, Part]] = []
        column = 0
        for path, width in zip(together.paths, together.widths, strict=True):
            found += [
                ((slice(s.start, s.end), slice(column, column + width)), part)
                for s in company.segments
                for part in s.adapter.parts.get(path, ())
                if not (by_table and s.adapter.in_table(path)) and (s.start, path) not in bunched
            ]
            column += width
        self.scaled_inputs = [(rows, p.vector) for (rows, _), p in found if isinstance(p, Scale) and p.of_input]
        self._scaled = [(place, p.vector) for place, p in found if isinstance(p, Scale) and not p.of_input]
        self._own = [(place, p) for place, p in found if isinstance(p, Own)]
        self._rows = [(place, p) for place, p in found if isinstance(p, Rows)]
        self._lows = [(place, p) for place, p in found if isinstance(p, Low)]
        self._biases = {(rows.start, columns.start): p.bias_O for (rows, columns), p in self._own}
        self.is_nothing = not found and not self._bunches

    def embedded(self, ids_R: Tensor, y_RD: Tensor, scale: Tensor | float) -> None:
        """An embedding's result with every adapter's change, in place. `scale` is what the layer multiplies with."""
        for (rows, _), own in self._own:
            y_RD[rows] = F.embedding(ids_R[rows], own.weight_OI) * scale
        for (rows, _), low in self._lows:
            y_RD[rows] += F.embedding(ids_R[rows], low.a_rI.T) @ low.b_Or.T * scale
        for (rows, _), part in self._rows:
            hits = ids_R[rows][:, None] == part.ids[None, :]
            mine = part.rows_TD[hits.int().argmax(1)] * scale
            y_RD[rows] = torch.where(hits.any(1)[:, None], mine, y_RD[rows])

    def before(self, x_RI: Tensor) -> Tensor:
        """The rows as a layer is to see them."""
        if not self.scaled_inputs:
            return x_RI
        x_RI = x_RI.clone()
        for rows, vector in self.scaled_inputs:
            x_RI[rows] *= vector
        return x_RI

    def after(self, x_RI: Tensor, y_RO: Tensor, own_bias: Tensor | None) -> None:
        """Every adapter's change to the result, in place; `x_RI` are the rows that the layers saw."""
        for (rows, columns), own in self._own:
            y_RO[rows, columns] = F.linear(x_RI[rows], own.weight_OI, own.bias_O)
        for (rows, columns), part in self._rows:
            y_RO[rows, columns].index_copy_(1, part.ids, x_RI[rows] @ part.rows_TD.T)
        for (rows, columns), low in self._lows:
            bias = None if own_bias is None else own_bias[columns]
            _change(x_RI[rows], y_RO[rows, columns], low, self._biases.get((rows.start, columns.start), bias))
        for rows, stack in self._bunches:
            stack.add(x_RI[rows], y_RO[rows])
        for place, vector in self._scaled:
            y_RO[place] *= vector


def _plain(adapter: Loaded, path: str) -> Low | None:
    """An adapter's low-rank change of a layer, if that is all there is to it."""
    low = adapter.in_table(path)
    return low if low is not None and low.stretch_O is None else None


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
