"""Decoder layers of the usual kind (norm, attention, norm, gated MLP) as one straight function, for processors.

A step of a small model that decodes spends a quarter of its time between the
products: in a dozen modules a layer and in small steps such as those of rotary
positions. Names only suggest which layers are of this kind; each is tried on
random rows, with a stand-in for attention, and keeps its own code if that does
something else. Plain reference: that code.

R = rows of a pass, D = width of the model, H = query heads, K = key heads, W = width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.client.gates import is_silu
from symbiosis.client.layers import mix_in
from symbiosis.engine.bank import Bank
from symbiosis.engine.effects import Effect, Together

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ROWS = 5
_CLOSE = 1e-4


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


@dataclass(slots=True)
class Straight:
    """What the function needs to know of one layer."""

    bank: Bank
    rotary: Rotary
    memory: Any
    number: int
    heads: int
    width: int
    qkv: Together
    out: Together
    gate_up: Together
    down: Together
    norm: Norm
    next_norm: Norm
    asked: dict[str, Any]
    """What the layer asks of attention besides."""

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        """The layer's result; None if an adapter wants its parts one by one."""
        bank, width = self.bank, self.width
        parts = (self.qkv, self.out, self.gate_up, self.down)
        of_qkv, of_out, of_gate_up, of_down = [bank.effect(part, of_head=False) for part in parts]
        if (of_qkv is not None and of_qkv.scaled_inputs) or (of_gate_up is not None and of_gate_up.scaled_inputs):
            return None
        bank.check(x_RD.shape[0], of_head=False)
        rows = self.norm(x_RD)
        qkv_RAW = _product(rows, self.qkv, of_qkv).view(x_RD.shape[0], -1, width)
        turned = (qkv_RAW.shape[1] + self.heads) // 2
        qk_RAW, v_RKW = qkv_RAW[:, :turned], qkv_RAW[:, turned:]
        cos, sin = self.rotary.of(embeddings)
        qk_ARW = torch.addcmul(qk_RAW * cos, qk_RAW.roll(width // 2, -1), sin).transpose(0, 1)
        q_HRW, k_KRW = qk_ARW[: self.heads], qk_ARW[self.heads :]
        found = self.memory.attend(self.number, q_HRW, k_KRW, v_RKW.transpose(0, 1), **self.asked)
        x_RD = _product(found.reshape(x_RD.shape[0], -1), self.out, of_out).add_(x_RD)
        rows = self.next_norm(x_RD)
        gate, up = _product(rows, self.gate_up, of_gate_up).chunk(2, dim=1)
        return _product(F.silu(gate).mul_(up), self.down, of_down).add_(x_RD)


def _product(x_RI: Tensor, together: Together, effect: Effect | None) -> Tensor:
    if effect is None:
        return together.product(x_RI)
    x_RI = effect.before(x_RI)
    y_RO = together.product(x_RI)
    effect.after(x_RI, y_RO, together.bias_O)
    return y_RO


class StraightLayer(nn.Module):
    """Mixed into the class of a decoder layer."""

    symbiosis_straight: Straight

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *more: Any,
        position_embeddings: Any = None,
        **named: Any,
    ) -> Any:
        if not more and attention_mask is None and position_embeddings is not None:
            found = self.symbiosis_straight.compute(hidden_states[0], position_embeddings)
            if found is not None:
                return found[None]
        return super().forward(hidden_states, attention_mask, *more, position_embeddings=position_embeddings, **named)


class _Witness:
    """Stands in for attention: notes what it is asked, and answers with something that all of it shows in."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.number = -1

    def attend(self, layer: int, q_HRW: Tensor, k_KRW: Tensor, v_KRW: Tensor, **asked: Any) -> Tensor:
        self.asked, self.number = asked, layer
        groups = q_HRW.shape[0] // k_KRW.shape[0]
        return (q_HRW + (k_KRW * 2 + v_KRW * 3).repeat_interleave(groups, 0)).transpose(0, 1)


@torch.inference_mode()
def straighten(model: PreTrainedModel, bank: Bank) -> None:
    """Let the layers of this model that can be straight be so. They are adapted, and lie together, already."""
    rotary = Rotary()
    bank.begin((), ())
    for layer in list(model.modules()):
        if _children(layer) == _LAYER and _looks_usual(layer):
            straight = _tried(layer, bank, rotary)
            if straight is not None:
                mix_in(layer, StraightLayer)
                object.__setattr__(layer, "symbiosis_straight", straight)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _looks_usual(layer: Any) -> bool:
    if not (_children(layer.self_attn) == _ATTENTION and _children(layer.mlp) == _MLP and is_silu(layer.mlp.act_fn)):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    together = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    linear = [*together[0], attention.o_proj, *together[1], mlp.down_proj]
    if not all(isinstance(each, nn.Linear) and each.weight.dtype is torch.float32 for each in linear):
        return False
    return all(len({id(each.symbiosis_together) for each in group}) == 1 for group in together)


def _tried(layer: Any, bank: Bank, rotary: Rotary) -> Straight | None:
    """None if its own code gives something else, or cannot be tried like this."""
    attention, memory, witness = layer.self_attn, layer.self_attn.symbiosis_memory, _Witness()
    width = int(getattr(attention, "head_dim", 0))
    if width < 2 or width % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x_1RD = torch.randn(1, _ROWS, attention.q_proj.in_features, generator=generator)
    angles = torch.randn(1, _ROWS, width, generator=generator)
    embeddings = (angles.cos(), angles.sin())
    object.__setattr__(attention, "symbiosis_memory", witness)
    try:
        expected = layer(x_1RD, position_embeddings=embeddings)
        straight = Straight(
            bank, rotary, witness, witness.number, attention.q_proj.out_features // width, width,
            attention.q_proj.symbiosis_together, attention.o_proj.symbiosis_together,
            layer.mlp.gate_proj.symbiosis_together, layer.mlp.down_proj.symbiosis_together,
            _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm), witness.asked,
        )  # fmt: skip
        found = straight.compute(x_1RD[0], embeddings)
        if found is None or not isinstance(expected, Tensor) or witness.asked != straight.asked:
            return None
        if not torch.allclose(found, expected[0], rtol=0, atol=_CLOSE * float(expected.abs().max())):
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it is built in another way
        return None
    finally:
        object.__setattr__(attention, "symbiosis_memory", memory)
    straight.memory = memory
    return straight


def _norm(module: Any) -> Norm:
    epsilon = getattr(module, "variance_epsilon", None)
    return Norm(module.weight, float(module.eps if epsilon is None else epsilon))
