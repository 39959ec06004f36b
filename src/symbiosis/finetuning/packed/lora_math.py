"""What trained adapters do to a layer, under autograd: PEFT's formulas over some rows of a pass.

R = rows of one session, I / O = input and output width, r = rank.

These are the plain products. Kernels for the low-rank changes of many sessions at once belong into
`layers.AdaptedLinear`, which sees all of them; what is here is their reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

Drop: TypeAlias = Callable[[Tensor, float], Tensor]
"""Dropout of a session's rows at a layer, at a rate."""


class TrainableLora:
    """LoRA, rsLoRA and DoRA: y + scale · B A x, or that brought to the magnitude's length."""

    def __init__(
        self,
        a_rI: nn.Parameter,
        b_Or: nn.Parameter,
        scale: float,
        *,
        dropout: float = 0.0,
        magnitude_O: nn.Parameter | None = None,
        bias_O: nn.Parameter | None = None,
    ) -> None:
        self.a_rI, self.b_Or, self.scale, self.dropout = a_rI, b_Or, scale, dropout
        self.magnitude_O, self.bias_O = magnitude_O, bias_O
        self._length_O: Tensor | None = None

    def forget(self) -> None:
        """The parameters were changed: what was worked out from them no longer holds."""
        self._length_O = None

    def after(self, x_RI: Tensor, y_RO: Tensor, layer: nn.Linear | Conv1D, drop: Drop) -> Tensor:
        """The layer's result with the change in it, in the dtype it had."""
        x_RI = x_RI.to(self.a_rI.dtype)
        if self.dropout:
            x_RI = drop(x_RI, self.dropout)
        low_RO = F.linear(F.linear(x_RI, self.a_rI), self.b_Or, self.bias_O)
        if self.magnitude_O is None:
            return (y_RO + low_RO * self.scale).to(y_RO.dtype)
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        stretch_O = self.magnitude_O / self._length(weight_OI)
        if self.dropout:  # as PEFT: what is dropped is dropped for the layer's own weight too
            plain_RO = F.linear(x_RI, weight_OI.to(x_RI.dtype))
        else:
            plain_RO = y_RO if layer.bias is None else y_RO - layer.bias
        change_RO = (stretch_O - 1) * plain_RO + stretch_O * low_RO * self.scale
        return (y_RO + change_RO).to(y_RO.dtype)

    @torch.no_grad()
    def _length(self, weight_OI: Tensor) -> Tensor:
        """‖W + scale · B A‖ by row. No gradient goes through it (DoRA, section 4.3), so it is the same between two steps."""
        if self._length_O is None:
            pairs = zip(torch.split(weight_OI, 1024), torch.split(self.b_Or, 1024), strict=True)
            self._length_O = torch.cat(
                [torch.linalg.norm(rows.to(b.dtype) + self.scale * (b @ self.a_rI), dim=1) for rows, b in pairs]
            )
        return self._length_O


class TrainableIa3:
    """IA3: what a layer reads, or what it gives, times a vector."""

    def __init__(self, vector: nn.Parameter, *, of_input: bool) -> None:
        self.vector, self.of_input = vector, of_input

    def forget(self) -> None:
        """Nothing is worked out ahead."""

    def scaled(self, x: Tensor) -> Tensor:
        return (x.to(self.vector.dtype) * self.vector.flatten()).to(x.dtype)


Part: TypeAlias = TrainableLora | TrainableIa3
