"""What the adapters of a pass do to layers that read the same rows, by plain products.

Weights are never gathered per row. An adapter is two products with its rows.
Neighbours with as many rows each are one batched product over their weights,
stacked: half the time of product by product where rows are few. Stacks are
copies, so they are made for a company that stays. Kernels (`kernels.low_rank`)
do without.

R = rows, A = adapters, I / O = input and output width, r = rank, B = ranks of layers side by side.
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
from symbiosis.executor.product import product

_FEW_ROWS = 16
_LONGEST = 16  # adapters in a stack
_KEEP = 32  # adapters in the stacks of one layer that are kept for other companies: a stack is as large as its adapters there
_PADDED = 2.0  # a stack may be so many times as large as what is in it
_SETTLED = 4  # passes after which a company is worth stacks


class Together:
    """Layers that read the same rows and lie next to each other in memory: one matrix. Often a single layer."""

    def __init__(self, paths: Sequence[str], widths: Sequence[int], weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.paths, self.widths, self.weight_OI, self.bias_O = tuple(paths), list(widths), weight_OI, bias_O
        self._weight_IO = weight_OI.t() if bias_O is None and weight_OI.stride(0) == 1 else None
        self._seen: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}

    @cached_property
    def members(self) -> Any:
        """For kernels."""
        from symbiosis.kernels.low_rank import Members

        return Members(self.widths, self.weight_OI.device)

    def product(self, x_RI: Tensor) -> Tensor:
        """The layers' results side by side."""
        if self._weight_IO is not None:  # what `F.linear` comes to in the end, 13 µs sooner
            return torch.mm(x_RI, self._weight_IO)
        return product(x_RI, self.weight_OI, self.bias_O)

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


_Lows = Sequence[Sequence[Low | None]]  # by layer and adapter


@dataclass(frozen=True, slots=True)
class Stack:
    """Low-rank changes by several adapters to layers that read the same rows. Whose rank is smaller has zeros there."""

    a_AIB: Tensor
    """Of all layers side by side."""
    ranks: list[int]
    """Of each layer that anything is done to, its columns in that."""
    widths: list[int]
    """Of each layer, its columns of the result."""
    b_ArO: list[Tensor | None]
    """Of each layer; None if nothing is done to it."""

    @staticmethod
    def of(together: Together, lows: _Lows) -> Stack:
        a: list[Tensor] = []
        b: list[Tensor | None] = []
        like = together.weight_OI
        for width, of_layer in zip(together.widths, lows, strict=True):
            rank = max(_rank(low) for low in of_layer)
            if not rank:
                b.append(None)
                continue
            a_AIr = like.new_zeros(len(of_layer), like.shape[1], rank)
            b_ArO = like.new_zeros(len(of_layer), rank, width)
            for number, low in enumerate(of_layer):
                if low is not None:
                    a_AIr[number, :, : _rank(low)] = low.a_rI.T
                    b_ArO[number, : _rank(low)] = low.b_Or.T
            a.append(a_AIr)
            b.append(b_ArO)
        return Stack(torch.cat(a, dim=2) if len(a) > 1 else a[0], [each.shape[2] for each in a], together.widths, b)

    def add(self, x_RI: Tensor, y_RO: Tensor) -> None:
        """The changes, in place. Rows of one adapter behind the other's, as many of each."""
        count, width, _ = self.a_AIB.shape
        y_AmO = y_RO.view(count, -1, y_RO.shape[1])
        low_AmB = torch.bmm(x_RI.view(count, -1, width), self.a_AIB)
        lows = iter(torch.split(low_AmB, self.ranks, 2))
        for y_Amo, b_Aro in zip(torch.split(y_AmO, self.widths, 2), self.b_ArO, strict=True):
            if b_Aro is not None:
                y_Amo.baddbmm_(next(lows), b_Aro)


def _rank(low: Low | None) -> int:
    return 0 if low is None else low.a_rI.shape[0]


def _is_dense(lows: _Lows) -> bool:
    """Whether a stack of these would not be zeros for the most part."""
    real = sum(_rank(low) for of_layer in lows for low in of_layer)
    return 0 < sum(len(of_layer) * max(map(_rank, of_layer)) for of_layer in lows) <= _PADDED * real


class Stacks:
    """Those at hand, the latest of each layer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], OrderedDict[tuple[Loaded, ...], Stack]] = {}

    def of(self, together: Together, adapters: tuple[Loaded, ...], lows: _Lows, *, make: bool) -> Stack | None:
        """The stack of these adapters; None if there is none and none is to be made."""
        kept = self._kept.setdefault(together.paths, OrderedDict())
        stack = kept.get(adapters)
        if stack is None and make:
            while kept and sum(map(len, kept)) + len(adapters) > _KEEP:
                kept.popitem(last=False)
            stack = kept[adapters] = Stack.of(together, lows)
        if stack is not None:
            kept.move_to_end(adapters)
        return stack

    def forget(self, adapter: Loaded) -> None:
        for kept in self._kept.values():
            for key in [key for key in kept if adapter in key]:
                del kept[key]


class Company:
    """The segments of a pass, and what follows from them, layer by layer."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.effects: dict[tuple[str, ...], Effect] = {}
        self.runs = _runs(segments)
        self._passes = 0

    @property
    def is_settled(self) -> bool:
        return self._passes >= _SETTLED

    def count(self) -> None:
        """One more pass."""
        self._passes += 1
        if self._passes == _SETTLED and self.runs:
            self.effects.clear()


def _runs(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Neighbours that have few rows, and as many each."""
    found: list[tuple[Segment, ...]] = []
    for segment in segments:
        count = segment.end - segment.start
        if count > _FEW_ROWS:
            continue
        last = found[-1][-1] if found else None
        alike = last is not None and last.end == segment.start and last.end - last.start == count
        if alike and len(found[-1]) < _LONGEST:
            found[-1] = (*found[-1], segment)
        else:
            found.append((segment,))
    return [run for run in found if len(run) > 1]


_Place = tuple[slice, slice]  # rows and columns of the result


class Effect:
    """What the adapters of one company do to layers that read the same rows; their results lie side by side."""

    def __init__(self, together: Together, company: Company, stacks: Stacks, *, by_table: bool) -> None:
        self._stacks: list[tuple[int, int, Stack]] = []
        stacked: set[tuple[int, str]] = set()
        for run in () if by_table else company.runs:
            lows = [[_plain(segment.adapter, path) for segment in run] for path in together.paths]
            if not _is_dense(lows):
                continue
            stack = stacks.of(together, tuple(segment.adapter for segment in run), lows, make=company.is_settled)
            if stack is not None:
                self._stacks.append((run[0].start, run[-1].end - run[0].start, stack))
                stacked |= {
                    (segment.start, path)
                    for path, of_layer in zip(together.paths, lows, strict=True)
                    for segment, low in zip(run, of_layer, strict=True)
                    if low is not None
                }
        found: list[tuple[_Place, Part]] = []
        column = 0
        for path, width in zip(together.paths, together.widths, strict=True):
            found += [
                ((slice(s.start, s.end), slice(column, column + width)), part)
                for s in company.segments
                for part in s.adapter.parts.get(path, ())
                if not (by_table and s.adapter.in_table(path)) and (s.start, path) not in stacked
            ]
            column += width
        self.scaled_inputs = [(rows, p.vector) for (rows, _), p in found if isinstance(p, Scale) and p.of_input]
        self._scaled = [(place, p.vector) for place, p in found if isinstance(p, Scale) and not p.of_input]
        self._own = [(place, p) for place, p in found if isinstance(p, Own)]
        self._rows = [(place, p) for place, p in found if isinstance(p, Rows)]
        self._lows = [(place, p) for place, p in found if isinstance(p, Low)]
        self._biases = {(rows.start, columns.start): p.bias_O for (rows, columns), p in self._own}
        self.is_nothing = not found and not self._stacks
        self._is_stacked = not found  # and nothing else

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
        for start, count, stack in self._stacks:
            if count == x_RI.shape[0]:
                stack.add(x_RI, y_RO)
            else:
                stack.add(x_RI.narrow(0, start, count), y_RO.narrow(0, start, count))
        if self._is_stacked:
            return
        for (rows, columns), own in self._own:
            y_RO[rows, columns] = F.linear(x_RI[rows], own.weight_OI, own.bias_O)
        for (rows, columns), part in self._rows:
            y_RO[rows, columns].index_copy_(1, part.ids, x_RI[rows] @ part.rows_TD.T)
        for (rows, columns), low in self._lows:  # `narrow` is twice as fast as an index, and there may be hundreds
            start, count = rows.start, rows.stop - rows.start
            column, width = columns.start, columns.stop - columns.start
            bias = None if own_bias is None else own_bias[columns]
            bias = self._biases.get((start, column), bias)
            _change(x_RI.narrow(0, start, count), y_RO.narrow(0, start, count).narrow(1, column, width), low, bias)
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
