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

Dropout: TypeAlias = Callable[[Tensor, float], Tensor]
"""Dropout of a session's rows at a layer, at a rate."""


class TrainableLora:
    """LoRA, rsLoRA and DoRA: y + scale · B A x; DoRA scales each row of W + scale · B A to its magnitude."""

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
        self._norm_O: Tensor | None = None

    def clear_cache(self) -> None:
        """Drop what was computed from the parameters."""
        self._norm_O = None

    def apply(self, x_RI: Tensor, y_RO: Tensor, layer: nn.Linear | Conv1D, dropout: Dropout) -> Tensor:
        """The layer's result with the delta, in its dtype."""
        x_RI = x_RI.to(self.a_rI.dtype)
        if self.dropout:
            x_RI = dropout(x_RI, self.dropout)
        lora_RO = F.linear(F.linear(x_RI, self.a_rI), self.b_Or, self.bias_O)
        if self.magnitude_O is None:
            return (y_RO + lora_RO * self.scale).to(y_RO.dtype)
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        if self._norm_O is None:  # constant between steps: no gradient flows through it (DoRA, section 4.3)
            with torch.no_grad():
                self._norm_O = dora_norm(weight_OI, self.a_rI, self.b_Or, self.scale)
        mag_norm_scale_O = self.magnitude_O / self._norm_O
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
