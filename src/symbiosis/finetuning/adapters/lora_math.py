"""Trained adapters' parts of a layer, under autograd: PEFT's formulas over the rows of one session.

R = rows of one session, I / O = input and output width, r = rank.

These plain products are the reference of `kernels.lora.grouped`, which computes the LoRA deltas of many sessions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters.dora_norm import dora_norm
from symbiosis.adapters.parts import Ia3Part
from symbiosis.distributed.parallel_model import ParallelLayer

Dropout: TypeAlias = Callable[[Tensor, float], Tensor]
"""Dropout of a session's rows at a layer, at a rate."""


class TrainableLora:
    """LoRA, rsLoRA and DoRA: y + scale · B A x; DoRA scales each row of W + scale · B A to its magnitude."""

    def __init__(
        self,
        a_rI: Tensor,
        b_Or: Tensor,
        scale: float,
        *,
        dropout: float = 0.0,
        magnitude_O: Tensor | None = None,
        bias_O: Tensor | None = None,
    ) -> None:
        self.a_rI, self.b_Or, self.scale, self.dropout = a_rI, b_Or, scale, dropout
        self.magnitude_O, self.bias_O = magnitude_O, bias_O
        self._norms_O: list[Tensor] = []
        self._divided_inputs: ParallelLayer | None = None

    def clear_cache(self) -> None:
        """Drop what was computed from the parameters."""
        self._norms_O.clear()

    def divide(self, layer: ParallelLayer) -> TrainableLora:
        """The part of this shard, as views of the parameters."""
        if layer.style.divides_outputs:
            magnitude_O, bias_O = (None if each is None else each[layer.own] for each in (self.magnitude_O, self.bias_O))
            part = TrainableLora(
                self.a_rI, self.b_Or[layer.own], self.scale, dropout=self.dropout, magnitude_O=magnitude_O, bias_O=bias_O
            )
        else:
            bias_O = self.bias_O if layer.is_leader else None
            a_rI, magnitude_O = self.a_rI[:, layer.own], self.magnitude_O
            part = TrainableLora(a_rI, self.b_Or, self.scale, dropout=self.dropout, magnitude_O=magnitude_O, bias_O=bias_O)
            part._divided_inputs = layer
        part._norms_O = self._norms_O
        return part

    @torch.no_grad()
    def _norm(self, weight_OI: Tensor) -> Tensor:
        """DoRA's norm: constant between steps, no gradient flows through it (DoRA, section 4.3)."""
        if not self._norms_O:
            norm_O = dora_norm(weight_OI, self.a_rI, self.b_Or, self.scale)
            if self._divided_inputs is not None:
                norm_O = self._divided_inputs.sum(norm_O.square()).sqrt()
            self._norms_O.append(norm_O)
        return self._norms_O[0]

    def apply(self, x_RI: Tensor, y_RO: Tensor, layer: nn.Linear | Conv1D, dropout: Dropout) -> Tensor:
        """The layer's result with the delta, in its dtype."""
        x_RI = x_RI.to(self.a_rI.dtype)
        if self.dropout:
            x_RI = dropout(x_RI, self.dropout)
        lora_RO = F.linear(F.linear(x_RI, self.a_rI), self.b_Or, self.bias_O)
        if self.magnitude_O is None:
            return (y_RO + lora_RO * self.scale).to(y_RO.dtype)
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        mag_norm_scale_O = self.magnitude_O / self._norm(weight_OI)
        if self.dropout:  # as PEFT: dropout applies to the base layer's input, too
            base_RO = F.linear(x_RI, weight_OI.to(x_RI.dtype))
        else:
            base_RO = y_RO if layer.bias is None else y_RO - layer.bias
        delta_RO = (mag_norm_scale_O - 1) * base_RO + mag_norm_scale_O * lora_RO * self.scale
        return (y_RO + delta_RO).to(y_RO.dtype)


def scale_rows(part: Ia3Part, x: Tensor) -> Tensor:
    """IA3 under autograd, in the dtype of `x`."""
    return (x.to(part.vector.dtype) * part.vector.flatten()).to(x.dtype)


Part: TypeAlias = TrainableLora | Ia3Part


def divide_part(part: Part, layer: ParallelLayer) -> Part:
    """The part of this shard, as views of the parameters."""
    if isinstance(part, TrainableLora):
        return part.divide(layer)
    is_divided = part.of_input != layer.style.divides_outputs
    return Ia3Part(part.vector.flatten()[layer.own], part.of_input) if is_divided else part
