"""Stand-ins for GPU kernels in dry runs: they keep for backward what the kernels keep, and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.models.patches.mixin import mix_in

_OWN_NORMS = ("Gemma",)
"""Families whose norms the kernel does not compute (`models.rms_norms`)."""


class _Norm(torch.autograd.Function):
    """As `kernels.rms_norm`: the input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


class _Loss(torch.autograd.Function):
    """As `kernels.cross_entropy`: the logits are kept in their dtype, without a copy in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0])


class _FusedNorm(nn.Module):
    """In front of the class of an RMS norm."""

    def forward(self, x: Tensor) -> Any:
        return _Norm.apply(x, self.weight)  # type: ignore[no-untyped-call]


def use_gpu_kernels(model: Any) -> None:
    """Let the norms and the loss of a model in a dry run take the memory that they take on a GPU."""
    for module in list(model.modules()):
        name, weight = type(module).__name__, module._parameters.get("weight")
        if name.endswith("RMSNorm") and not name.startswith(_OWN_NORMS) and weight is not None and weight.dim() == 1:
            mix_in(module, _FusedNorm)
    model.loss_function = lambda logits, *_, **__: fused_loss(logits)


def fused_loss(logits: Tensor) -> Tensor:
    loss: Tensor = _Loss.apply(logits)  # type: ignore[no-untyped-call]
    return loss
