"""Adapters' ops at layers that read the same rows, as plain products.

Weights are never gathered per row. A CPU kernel (`kernels.cpu.lora`) computes LoRA deltas of few rows each. Every other
LoRA delta is two products over the adapter's segment.

R = rows, I / O = input and output width, r = rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.adapters.parts import Ia3Part
from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.kernels.cpu.lora import LoraBatchCpu, LoraRow
from symbiosis.kernels.cpu.packed_linear import PackedWeight, pack
from symbiosis.models.patches.linear import linear
from symbiosis.serving.lora.lora_weights import AdapterSegment, LoraWeights, Part, ReplacedWeights, TokenRows


class FusedProjection:
    """Layers that read the same rows and are adjacent in memory, as one matrix. Often a single layer."""

    def __init__(
        self,
        paths: Sequence[str],
        widths: Sequence[int],
        weight_OI: Tensor,
        bias_O: Tensor | None,
        parallel: ParallelLayer | None = None,
    ) -> None:
        """`parallel`, if these are a shard's part of the layers."""
        self.paths, self.widths, self.weight_OI, self.bias_O = tuple(paths), list(widths), weight_OI, bias_O
        self.parallel = parallel
        self._packed: PackedWeight | None = None
        self._cached_x: Tensor | None = None
        self._cached: dict[str, Tensor] = {}

    @cached_property
    def members(self) -> Any:
        """The widths, for kernels."""
        from symbiosis.kernels.lora.fused_widths import FusedWidths

        return FusedWidths(self.widths, self.weight_OI.device)

    def alone(self) -> AbstractContextManager[None]:
        """Compute without other shards inside."""
        return nullcontext() if self.parallel is None else self.parallel.alone()

    def enter(self, x: Tensor) -> Tensor:
        """The layers' input, of their divided part if they are one."""
        return x if self.parallel is None else self.parallel.enter(x)

    def leave(self, y: Tensor) -> Tensor:
        """The layers' result with those of the other shards, if there are any. May overwrite `y`."""
        return y if self.parallel is None else self.parallel.leave(y)

    def project(self, x_RI: Tensor) -> Tensor:
        """The layers' results, concatenated."""
        if self._packed is not None and x_RI.shape[0] in self._packed.rows:
            return self._packed.linear(x_RI)
        return linear(x_RI, self.weight_OI, self.bias_O)

    def pack(self) -> int:
        """Keep a packed copy of the weight for products on a CPU, if it can be packed. Returns its bytes."""
        self._packed = pack(self.weight_OI, self.bias_O)
        return 0 if self._packed is None else self.weight_OI.nbytes

    def share_packed(self, other: FusedProjection) -> None:
        """Use the packed copy of another projection of the same weight and bias."""
        self._packed = other._packed

    def pop_cached(self, path: str, x: Tensor) -> Tensor | None:
        """This layer's result for the same input, if another layer has computed it."""
        found = self._cached.pop(path, None) if self._cached_x is x else None
        if found is not None and not self._cached:
            self._cached_x = None
        return found

    def cache(self, x: Tensor, path: str, results: Sequence[Tensor]) -> Tensor:
        """Return one layer's result and cache the others'."""
        if len(results) == 1:
            return results[0]
        self._cached_x, self._cached = x, dict(zip(self.paths, results, strict=True))
        return self._cached.pop(path)


_Region = tuple[slice, slice]  # rows and columns of the result


class AdapterOps:
    """The ops of a batch's adapters at layers that read the same rows. Their results are concatenated.

    With `by_table`, GPU kernels compute what is in the slot table.
    """

    def __init__(self, fused: FusedProjection, segments: Sequence[AdapterSegment], *, by_table: bool) -> None:
        parts: list[tuple[_Region, Part]] = []
        cpu_rows: list[tuple[slice, slice, LoraRow]] = []
        column = 0
        for path, width in zip(fused.paths, fused.widths, strict=True):
            columns = slice(column, column + width)
            for segment in segments:
                adapter, rows = segment.adapter, slice(segment.start, segment.end)
                cpu_row = adapter.cpu_rows.get(path)
                if by_table and adapter.table_lora(path):
                    continue
                if cpu_row is not None and cpu_row.is_for(segment.end - segment.start):
                    cpu_rows.append((rows, columns, cpu_row))
                else:
                    parts += [((rows, columns), part) for part in adapter.parts.get(path, ())]
            column += width
        self.scaled_inputs = [(rows, p.vector) for (rows, _), p in parts if isinstance(p, Ia3Part) and p.of_input]
        self._scaled = [(region, p.vector) for region, p in parts if isinstance(p, Ia3Part) and not p.of_input]
        self._replaced = [(region, p) for region, p in parts if isinstance(p, ReplacedWeights)]
        self._token_rows = [(region, p) for region, p in parts if isinstance(p, TokenRows)]
        self._loras = [(region, p) for region, p in parts if isinstance(p, LoraWeights)]
        self._cpu_batch = LoraBatchCpu(cpu_rows, fused.weight_OI.shape[1]) if cpu_rows else None
        self._biases = {(rows.start, columns.start): p.bias_O for (rows, columns), p in self._replaced}
        self.is_empty = not parts and not cpu_rows

    def apply_to_embedding(self, ids_R: Tensor, y_RD: Tensor, scale: Tensor | float) -> None:
        """Apply all ops to an embedding's result in place. The layer multiplies rows by `scale`."""
        for (rows, _), replaced in self._replaced:
            y_RD[rows] = F.embedding(ids_R[rows], replaced.weight_OI) * scale
        for (rows, _), lora in self._loras:
            y_RD[rows] += F.embedding(ids_R[rows], lora.a_rI.T) @ lora.b_Or.T * scale
        for (rows, _), part in self._token_rows:
            hits = ids_R[rows][:, None] == part.ids[None, :]
            trained = part.rows_TD[hits.int().argmax(1)] * scale
            y_RD[rows] = torch.where(hits.any(1)[:, None], trained, y_RD[rows])

    def scale_inputs(self, x_RI: Tensor) -> Tensor:
        """The layers' input with IA3 applied."""
        if not self.scaled_inputs:
            return x_RI
        x_RI = x_RI.clone()
        for rows, vector in self.scaled_inputs:
            x_RI[rows] *= vector
        return x_RI

    def apply(self, x_RI: Tensor, y_RO: Tensor, base_bias_O: Tensor | None) -> None:
        """Apply all ops to the layers' result in place. `x_RI` is the layers' input."""
        for (rows, columns), replaced in self._replaced:
            y_RO[rows, columns] = F.linear(x_RI[rows], replaced.weight_OI, replaced.bias_O)
        for (rows, columns), part in self._token_rows:
            y_RO[rows, columns].index_copy_(1, part.ids, x_RI[rows] @ part.rows_TD.T)
        if self._cpu_batch is not None:
            self._cpu_batch.add(x_RI, y_RO)
        for (rows, columns), lora in self._loras:  # `narrow` is twice as fast as an index, and there may be hundreds
            start, count = rows.start, rows.stop - rows.start
            column, width = columns.start, columns.stop - columns.start
            bias_O = None if base_bias_O is None else base_bias_O[columns]
            bias_O = self._biases.get((start, column), bias_O)
            _add_delta(x_RI.narrow(0, start, count), y_RO.narrow(0, start, count).narrow(1, column, width), lora, bias_O)
        for region, vector in self._scaled:
            y_RO[region] *= vector


def _add_delta(x_RI: Tensor, y_RO: Tensor, lora: LoraWeights, base_bias_O: Tensor | None) -> None:
    """Add one adapter's delta to its rows in place; `y_RO` is a view."""
    bias_O = base_bias_O if lora.mag_norm_scale_O is not None else None  # DoRA does not scale the base layer's bias
    if bias_O is not None:
        y_RO -= bias_O
    y_RO.addmm_(x_RI @ lora.a_rI.T, lora.b_Or.T)
    if lora.mag_norm_scale_O is not None:
        y_RO.mul_(lora.mag_norm_scale_O)
    if bias_O is not None:
        y_RO += bias_O
    if lora.bias_O is not None:
        y_RO += lora.bias_O
