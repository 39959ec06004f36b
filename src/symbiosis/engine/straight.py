"""Decoder layers of the usual kind as one straight function, for processors.

A step of a small model that decodes spends a quarter of its time between the
products: in a dozen modules a layer and in small steps such as those of rotary
positions. Plain reference: the layer's own code (`usual`).

R = rows of a pass, D = width of the model, H = query heads, K = key heads, W = width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.client.fused import epsilon_of
from symbiosis.engine.bank import Bank
from symbiosis.engine.effects import Effect, Together
from symbiosis.engine.usual import Usual, Witness, stand_in, usual_layers


class Rotary:
    """Rotary positions of the pass that runs, as all its layers need them."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._made: tuple[Tensor, Tensor] | None = None

    def of(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos, and sin with the sign of the half it is multiplied with, [R, 1, W] both."""
        if self._seen is not embeddings or self._made is None:
            cos_RW, sin_RW = embeddings[0][0], embeddings[1][0]
            first, second = sin_RW.chunk(2, dim=-1)
            self._made = cos_RW[:, None], torch.cat((-first, second), dim=-1)[:, None]
            self._seen = embeddings
        return self._made


class Norm:
    """An RMS norm by its rows' lengths: half the time of `F.rms_norm`, its reference, for a few dozen rows."""

    def __init__(self, weight_D: Tensor, epsilon: float) -> None:
        self._weight_D = weight_D * weight_D.numel() ** 0.5
        self._shortest = torch.tensor((epsilon * weight_D.numel()) ** 0.5)

    def __call__(self, x_RD: Tensor) -> Tensor:
        lengths_R1 = torch.hypot(torch.linalg.vector_norm(x_RD, dim=1, keepdim=True), self._shortest)
        return (x_RD * lengths_R1.reciprocal_()).mul_(self._weight_D)


class Straight:
    """The function of one layer."""

    def __init__(self, usual: Usual, bank: Bank, rotary: Rotary) -> None:
        self.usual, self._bank, self._rotary = usual, bank, rotary
        self._norm, self._next_norm = (Norm(norm.weight, epsilon_of(norm)) for norm in (usual.norm, usual.next_norm))

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        bank, usual, width = self._bank, self.usual, self.usual.width
        parts = (usual.qkv, usual.out, usual.gate_up, usual.down)
        of_qkv, of_out, of_gate_up, of_down = [bank.effect(part, of_head=False) for part in parts]
        if (of_qkv is not None and of_qkv.scaled_inputs) or (of_gate_up is not None and of_gate_up.scaled_inputs):
            return None
        bank.check(x_RD.shape[0], of_head=False)
        rows = self._norm(x_RD)
        qkv_RAW = _product(rows, usual.qkv, of_qkv).view(x_RD.shape[0], -1, width)
        turned = (qkv_RAW.shape[1] + usual.heads) // 2
        qk_RAW, v_RKW = qkv_RAW[:, :turned], qkv_RAW[:, turned:]
        cos, sin = self._rotary.of(embeddings)
        qk_ARW = torch.addcmul(qk_RAW * cos, qk_RAW.roll(width // 2, -1), sin).transpose(0, 1)
        q_HRW, k_KRW = qk_ARW[: usual.heads], qk_ARW[usual.heads :]
        found = usual.memory.attend(usual.number, q_HRW, k_KRW, v_RKW.transpose(0, 1), **usual.asked)
        x_RD = _product(found.reshape(x_RD.shape[0], -1), usual.out, of_out).add_(x_RD)
        rows = self._next_norm(x_RD)
        gate, up = _product(rows, usual.gate_up, of_gate_up).chunk(2, dim=1)
        return _product(F.silu(gate).mul_(up), usual.down, of_down).add_(x_RD)


def _product(x_RI: Tensor, together: Together, effect: Effect | None) -> Tensor:
    if effect is None:
        return together.product(x_RI)
    x_RI = effect.before(x_RI)
    y_RO = together.product(x_RI)
    effect.after(x_RI, y_RO, together.bias_O)
    return y_RO


@torch.inference_mode()
def straighten(model: PreTrainedModel, bank: Bank) -> None:
    """Let the layers of this model that can be straight be so. They are adapted, and lie together, already."""
    rotary = Rotary()
    bank.begin((), ())
    for layer in usual_layers(model):
        if layer.mlp.down_proj.weight.dtype is torch.float32:
            stand_in(layer, lambda usual: Straight(usual, bank, rotary), Witness())
