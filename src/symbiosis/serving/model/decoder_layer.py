"""Decoder layers of the usual kind: norm, attention, norm, gated MLP. Found by name, and tried.

Names only suggest which layers are of this kind. A function that should stand
for such a layer is tried on random rows, with a stand-in for attention; the
layer keeps its own code if that does something else.

R = rows of a pass, D = width of the model, H = query heads, K = key heads, W = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.models.patches.gated_mlp import is_silu
from symbiosis.models.patches.mixin import mix_in
from symbiosis.serving.lora.lora_ops import FusedProjection

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ROWS = 5
_SMALL = 0.01  # rows that a layer adds to: so small that what it adds shows also where numbers have 8 bits
_CLOSE, _COARSE = {torch.float32: 1e-4}, 0.02


class LayerParts:
    """What a function that stands for such a layer needs to know of it."""

    def __init__(self, layer: Any, witness: AttentionStub) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width = int(attention.head_dim)
        self.heads = attention.q_proj.out_features // self.width
        self.qkv: FusedProjection = attention.q_proj.symbiosis_fused
        self.out: FusedProjection = attention.o_proj.symbiosis_fused
        self.gate_up: FusedProjection = mlp.gate_proj.symbiosis_fused
        self.down: FusedProjection = mlp.down_proj.symbiosis_fused
        self.norm, self.next_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.number, self.asked = witness.number, witness.asked
        self.memory: Any = witness
        """Where the layer attends; what it asks of attention besides is `asked`."""


class Function(Protocol):
    """Stands for a layer."""

    usual: LayerParts

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        """The layer's result; None if an adapter wants its parts one by one."""


class AttentionStub:
    """Stands in for attention: notes what it is asked, and answers with something that all of it shows in."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.number = -1
        self.heads = (0, 0)
        """Of queries and of keys."""

    def attend(self, layer: int, q_HRW: Tensor, k_KRW: Tensor, v_KRW: Tensor, **asked: Any) -> Tensor:
        self.asked, self.number, self.heads = asked, layer, (q_HRW.shape[0], k_KRW.shape[0])
        groups = self.heads[0] // self.heads[1]
        return (q_HRW + (k_KRW * 2 + v_KRW * 3).repeat_interleave(groups, 0)).transpose(0, 1)


def usual_layers(model: PreTrainedModel) -> Iterator[Any]:
    """Those that look so. They are adapted, and lie together, already."""
    for layer in list(model.modules()):
        if _children(layer) == _LAYER and _looks_usual(layer):
            yield layer


def stand_in(layer: Any, make: Callable[[LayerParts], Function], witness: AttentionStub) -> Function | None:
    """Let what `make` makes stand for this layer, and return it; None if it does something else, or cannot be tried."""
    made = _tried(layer, make, witness)
    if made is not None:
        mix_in(layer, FusedDecoderLayer)
        object.__setattr__(layer, "symbiosis_function", made)
    return made


def _tried(layer: Any, make: Callable[[LayerParts], Function], witness: AttentionStub) -> Function | None:
    attention, memory = layer.self_attn, layer.self_attn.symbiosis_memory
    width, weight = int(getattr(attention, "head_dim", 0)), attention.q_proj.weight
    if width < 2 or width % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x_1RD = (_SMALL * torch.randn(1, _ROWS, attention.q_proj.in_features, generator=generator)).to(weight)
    angles = torch.randn(1, _ROWS, width, generator=generator)
    embeddings = (angles.cos().to(weight), angles.sin().to(weight))
    object.__setattr__(attention, "symbiosis_memory", witness)
    try:
        expected = layer(x_1RD, position_embeddings=embeddings)
        made = make(LayerParts(layer, witness))
        found = made.compute(x_1RD[0], embeddings)
        if found is None or not isinstance(expected, Tensor) or not is_close(found - x_1RD[0], expected[0] - x_1RD[0]):
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it is built in another way
        return None
    finally:
        object.__setattr__(attention, "symbiosis_memory", memory)
    made.usual.memory = memory
    return made


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether both are the same but for rounding."""
    room = _CLOSE.get(expected.dtype, _COARSE) * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=room)


def restore(model: PreTrainedModel) -> None:
    """Let all layers run their own code again."""
    for layer in model.modules():
        if isinstance(layer, FusedDecoderLayer):
            layer.__class__ = type(layer).__bases__[1]


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _looks_usual(layer: Any) -> bool:
    if not (_children(layer.self_attn) == _ATTENTION and _children(layer.mlp) == _MLP and is_silu(layer.mlp.act_fn)):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    together = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    linear = [*together[0], attention.o_proj, *together[1], mlp.down_proj]
    if not all(isinstance(each, nn.Linear) and hasattr(each, "symbiosis_fused") for each in linear):
        return False  # a kind of its own, which adapters do not know either
    if len({each.weight.dtype for each in linear}) > 1:
        return False
    return all(len({id(each.symbiosis_fused) for each in group}) == 1 for group in together)


def _turns_whole_heads(embeddings: Any, rows: int, width: int) -> bool:
    """Some models turn only a part of each head, which a layer may find out from how wide these are."""
    return embeddings is not None and all(tuple(each.shape) == (1, rows, width) for each in embeddings)


class FusedDecoderLayer(nn.Module):
    """Mixed into the class of a decoder layer that a function stands for."""

    symbiosis_function: Function

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *more: Any,
        position_embeddings: Any = None,
        **named: Any,
    ) -> Any:
        function, rows = self.symbiosis_function, hidden_states.shape[1]
        if not more and attention_mask is None and _turns_whole_heads(position_embeddings, rows, function.usual.width):
            found = function.compute(hidden_states[0], position_embeddings)
            if found is not None:
                return found[None]
        return super().forward(hidden_states, attention_mask, *more, position_embeddings=position_embeddings, **named)
