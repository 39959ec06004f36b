"""The part of a layer that one shard computes, and how the parts of all shards make up the layer's result.

R = rows, I / O = input and output width. Plain reference: the layer in one piece (`executor.layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.models.patches.linear import linear
from symbiosis.split.executor.layers import Rows, differentiate
from symbiosis.split.executor.sharding.weights import ShardedWeight

Columns = Sequence[slice] | None
"""The columns of each rank. None: an input goes to every rank as a whole, an output is the sum of all ranks'."""


CHOICES = -1
"""Width of a tensor with one column for each expert of a row."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a call, as the ranks share it."""

    width: int
    columns: Columns = None
    is_index: bool = False
    """Of integers."""


@dataclass(frozen=True, slots=True)
class PartialCall:
    """One direction of a layer, or of several matrices that read the same rows."""

    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]
    compute: Callable[[Rows], Rows]
    """From this rank's columns of the inputs to its columns, or its summands, of the outputs."""


class MatrixPart:
    """Some outputs, or some inputs, of a matrix."""

    def __init__(self, weight: ShardedWeight, *, is_transposed: bool) -> None:
        """`is_transposed`: the weight is [I, O]."""
        self._weight, self._is_transposed = weight, is_transposed
        self.by_outputs = (weight.dim == 0) != is_transposed
        self.slices = weight.slices

    @property
    def weight_OI(self) -> Tensor:
        return self._weight.part.t() if self._is_transposed else self._weight.part

    def forward(self, x_RI: Tensor) -> Tensor:
        return linear(x_RI, self.weight_OI, None)

    def backward(self, grad_RO: Tensor) -> Tensor:
        return grad_RO @ self.weight_OI


def forward_of_matrices(parts: Sequence[MatrixPart], in_width: int, out_widths: Sequence[int]) -> PartialCall:
    """All divided the same way."""
    first = parts[0]
    inputs = (Piece(in_width, None if first.by_outputs else first.slices),)
    outputs = tuple(
        Piece(width, part.slices if part.by_outputs else None) for part, width in zip(parts, out_widths, strict=True)
    )
    return PartialCall(inputs, outputs, lambda rows: tuple(part.forward(rows[0]) for part in parts))


def backward_of_matrices(parts: Sequence[MatrixPart], in_width: int, out_widths: Sequence[int]) -> PartialCall:
    """All divided the same way."""

    def compute(rows: Rows) -> Rows:
        total = parts[0].backward(rows[0])
        for part, grad in zip(parts[1:], rows[1:], strict=True):
            total.addmm_(grad, part.weight_OI)
        return (total,)

    first = parts[0]
    inputs = tuple(
        Piece(width, part.slices if part.by_outputs else None) for part, width in zip(parts, out_widths, strict=True)
    )
    return PartialCall(inputs, (Piece(in_width, None if first.by_outputs else first.slices),), compute)


class GatedPart:
    """Some inner columns of the gated MLP: gate and up by outputs, down by inputs. Its results are summands."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, biases: Sequence[Tensor | None], act: nn.Module) -> None:
        """Weights as [O, I]; biases of gate and up."""
        self._gate, self._up, self._down, self._act = gate, up, down, act
        self._gate_bias, self._up_bias = biases

    def forward(self, rows: Rows) -> Rows:
        (x,) = rows
        inner = self._act(linear(x, self._gate, self._gate_bias)).mul_(linear(x, self._up, self._up_bias))
        return (linear(inner, self._down, None),)

    def backward(self, rows: Rows) -> Rows:
        x, grad = rows
        gate, up = linear(x, self._gate, self._gate_bias), linear(x, self._up, self._up_bias)
        inner = grad @ self._down
        if isinstance(self._act, nn.SiLU):
            grad_up = F.silu(gate).mul_(inner)
            grad_gate = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        else:
            (grad_gate,) = differentiate(self._act, (gate,), inner * up)
            grad_up = inner.mul_(self._act(gate))
        return (torch.mm(grad_gate, self._gate).addmm_(grad_up, self._up),)


class ExpertsPart:
    """Some experts. Rows of other experts get the weight 0 here."""

    def __init__(self, module: Any, experts: slice, out_width: int) -> None:
        """`module` has the weights of these experts only."""
        self._module, self._experts, self._out_width = module, experts, out_width

    def _local(self, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        is_local = (index >= self._experts.start) & (index < self._experts.stop)
        return torch.where(is_local, index - self._experts.start, 0), torch.where(is_local, weight, 0)

    def forward(self, rows: Rows) -> Rows:
        x, index, weight = rows
        if self._experts.start == self._experts.stop:
            return (x.new_zeros(x.shape[0], self._out_width),)
        return (self._module(x, *self._local(index, weight)),)

    def backward(self, rows: Rows) -> Rows:
        x, index, weight, grad = rows
        if self._experts.start == self._experts.stop:
            return torch.zeros_like(x), torch.zeros_like(weight)

        def function(x: Tensor, weight: Tensor) -> Tensor:
            result: Tensor = self._module(x, *self._local(index, weight))
            return result

        return differentiate(function, (x, weight), grad)
