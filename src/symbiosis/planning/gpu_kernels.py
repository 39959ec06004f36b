"""Stand-ins for GPU kernels in dry runs: they keep for backward what the kernels keep, and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN

from symbiosis.models.patches.gated_mlp import GATED_MLP
from symbiosis.models.patches.mixin import mix_in

_ATTENTION = "symbiosis_dry"
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


class _SiluMul(torch.autograd.Function):
    """As `kernels.silu_mul`: gate and up are kept, the activation of the gate is not."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class _GatedMlp(nn.Module):
    """In front of the class of an MLP."""

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call, operator]


class _Attention(torch.autograd.Function):
    """As flash attention: queries, keys, values and the result are kept. Heads come before rows, in the result after them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        ctx.save_for_backward(q, k, v, found)
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


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


def use_packed_kernels(model: Any) -> None:
    """The same for the gated MLPs and the attention of an engine and a trainer, which run on packed rows."""
    silu = type(ACT2FN["silu"])
    for module in list(model.modules()):
        if {name for name, _ in module.named_children()} == GATED_MLP and type(module.act_fn) is silu:
            mix_in(module, _GatedMlp)
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    model.set_attn_implementation(_ATTENTION)


def _attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None  # type: ignore[no-untyped-call]


def fused_loss(logits: Tensor) -> Tensor:
    loss: Tensor = _Loss.apply(logits)  # type: ignore[no-untyped-call]
    return loss
