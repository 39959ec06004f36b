"""What the adapters of a pass do to layers that read the same rows, by plain products.

Weights are never gathered per row. Low-rank changes of a few rows each are left
to a kernel for processors (`kernels.cpu`); any other adapter is two products with
its rows.

R = rows, I / O = input and output width, r = rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.cpu.lora import LoraBatchCpu, LoraRow
from symbiosis.models.patches.linear import product
from symbiosis.serving.lora.lora_weights import AdapterSegment, Ia3Weights, LoraWeights, Part, ReplacedWeights, TokenRows


class FusedProjection:
    """Layers that read the same rows and lie next to each other in memory: one matrix. Often a single layer."""

    def __init__(self, paths: Sequence[str], widths: Sequence[int], weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.paths, self.widths, self.weight_OI, self.bias_O = tuple(paths), list(widths), weight_OI, bias_O
        self._weight_IO = weight_OI.t() if bias_O is None and weight_OI.stride(0) == 1 else None
        self._seen: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}

    @cached_property
    def members(self) -> Any:
        """For kernels."""
        from symbiosis.kernels.lora.fused_widths import FusedWidths

        return FusedWidths(self.widths, self.weight_OI.device)

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


class AdapterGroup:
    """The segments of a pass, and what follows from them, layer by layer."""

    def __init__(self, segments: Sequence[AdapterSegment]) -> None:
        self.segments = segments
        self.effects: dict[tuple[str, ...], AdapterOps] = {}


_Place = tuple[slice, slice]  # rows and columns of the result


class AdapterOps:
    """What the adapters of one company do to layers that read the same rows; their results lie side by side."""

    def __init__(self, together: FusedProjection, company: AdapterGroup, *, by_table: bool) -> None:
        found: list[tuple[_Place, Part]] = []
        changes: list[tuple[slice, slice, LoraRow]] = []
        column = 0
        for path, width in zip(together.paths, together.widths, strict=True):
            columns = slice(column, column + width)
            for segment in company.segments:
                adapter, rows = segment.adapter, slice(segment.start, segment.end)
                line = adapter.lines.get(path)
                if by_table and adapter.in_table(path):
                    continue
                if line is not None and line.is_for(segment.end - segment.start):
                    changes.append((rows, columns, line))
                else:
                    found += [((rows, columns), part) for part in adapter.parts.get(path, ())]
            column += width
        self.scaled_inputs = [(rows, p.vector) for (rows, _), p in found if isinstance(p, Ia3Weights) and p.of_input]
        self._scaled = [(place, p.vector) for place, p in found if isinstance(p, Ia3Weights) and not p.of_input]
        self._own = [(place, p) for place, p in found if isinstance(p, ReplacedWeights)]
        self._rows = [(place, p) for place, p in found if isinstance(p, TokenRows)]
        self._lows = [(place, p) for place, p in found if isinstance(p, LoraWeights)]
        self._changes = LoraBatchCpu(changes, together.weight_OI.shape[1]) if changes else None
        self._biases = {(rows.start, columns.start): p.bias_O for (rows, columns), p in self._own}
        self.is_nothing = not found and not changes

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
        if self._changes is not None:
            self._changes.add(x_RI, y_RO)
        for (rows, columns), low in self._lows:  # `narrow` is twice as fast as an index, and there may be hundreds
            start, count = rows.start, rows.stop - rows.start
            column, width = columns.start, columns.stop - columns.start
            bias = None if own_bias is None else own_bias[columns]
            bias = self._biases.get((start, column), bias)
            _change(x_RI.narrow(0, start, count), y_RO.narrow(0, start, count).narrow(1, column, width), low, bias)
        for place, vector in self._scaled:
            y_RO[place] *= vector


def _change(x: Tensor, y: Tensor, low: LoraWeights, own_bias: Tensor | None) -> None:
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
