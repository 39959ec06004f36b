"""Fused forward functions for decoder layers of the common kind: norm, attention, norm, gated MLP.

Candidates are found by the names of their children, and verified. A fused function is compared with the layer's own code on
random rows, with a stub for attention. The layer keeps its own code if the results differ.

R = rows of a batch, D = width of the model, H = query heads, K = key heads, W = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
_PROBE_ROWS = 5
_PROBE_SCALE = 0.01  # of the residual: small, so that the layer's own contribution shows even with 8 bits of mantissa
_TOLERANCE, _LOW_PRECISION_TOLERANCE = {torch.float32: 1e-4}, 0.02


class LayerParts:
    """The parts of a decoder layer that a fused function uses."""

    def __init__(self, layer: Any, stub: AttentionStub) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width = int(attention.head_dim)
        self.heads = attention.q_proj.out_features // self.width
        self.qkv: FusedProjection = attention.q_proj.symbiosis_fused
        self.out: FusedProjection = attention.o_proj.symbiosis_fused
        self.gate_up: FusedProjection = mlp.gate_proj.symbiosis_fused
        self.down: FusedProjection = mlp.down_proj.symbiosis_fused
        self.norm, self.next_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.number, self.attention_options = stub.layer, stub.options
        self.kv_cache: Any = stub
        """The stub during verification, then the `PagedKVCache`."""


class FusedForward(Protocol):
    """Computes a decoder layer."""

    parts: LayerParts

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        """The layer's result; None if an active adapter needs the layer's own code."""


class AttentionStub:
    """Replaces attention: records its options, and returns a value that depends on all its inputs."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.layer = -1
        self.heads = (0, 0)
        """Query heads and key heads."""

    def attend(self, layer: int, q_HRW: Tensor, k_KRW: Tensor, v_KRW: Tensor, **options: Any) -> Tensor:
        self.options, self.layer, self.heads = options, layer, (q_HRW.shape[0], k_KRW.shape[0])
        groups = self.heads[0] // self.heads[1]
        return (q_HRW + (k_KRW * 2 + v_KRW * 3).repeat_interleave(groups, 0)).transpose(0, 1)


def find_decoder_layers(model: PreTrainedModel) -> Iterator[Any]:
    """Layers that look like the common kind. Their projections must be adapted and fused already."""
    for layer in list(model.modules()):
        if _child_names(layer) == _LAYER and _has_common_parts(layer):
            yield layer


def fuse_layer(layer: Any, make: Callable[[LayerParts], FusedForward], stub: AttentionStub) -> FusedForward | None:
    """Replace the layer's forward by the function that `make` returns; None if it differs or fails on random rows."""
    fused = _verify(layer, make, stub)
    if fused is not None:
        mix_in(layer, FusedDecoderLayer)
        object.__setattr__(layer, "symbiosis_fused_forward", fused)
    return fused


def _verify(layer: Any, make: Callable[[LayerParts], FusedForward], stub: AttentionStub) -> FusedForward | None:
    attention, kv_cache = layer.self_attn, layer.self_attn.symbiosis_kv_cache
    width, weight = int(getattr(attention, "head_dim", 0)), attention.q_proj.weight
    if width < 2 or width % 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x_1RD = (_PROBE_SCALE * torch.randn(1, _PROBE_ROWS, attention.q_proj.in_features, generator=generator)).to(weight)
    angles = torch.randn(1, _PROBE_ROWS, width, generator=generator)
    embeddings = (angles.cos().to(weight), angles.sin().to(weight))
    object.__setattr__(attention, "symbiosis_kv_cache", stub)
    projections = {
        id(each.symbiosis_fused): each.symbiosis_fused for each in layer.modules() if hasattr(each, "symbiosis_fused")
    }
    try:
        with ExitStack() as stack:  # shards may decide differently
            for each in projections.values():
                stack.enter_context(each.alone())
            expected = layer(x_1RD, position_embeddings=embeddings)
            fused = make(LayerParts(layer, stub))
            found = fused.compute(x_1RD[0], embeddings)
        if found is None or not isinstance(expected, Tensor) or not is_close(found - x_1RD[0], expected[0] - x_1RD[0]):
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # a layer of another structure
        return None
    finally:
        object.__setattr__(attention, "symbiosis_kv_cache", kv_cache)
    fused.parts.kv_cache = kv_cache
    return fused


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether both are equal up to rounding."""
    tolerance = _TOLERANCE.get(expected.dtype, _LOW_PRECISION_TOLERANCE) * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=tolerance)


def unfuse_layers(model: PreTrainedModel) -> None:
    """Restore every layer's own forward."""
    for layer in model.modules():
        if isinstance(layer, FusedDecoderLayer):
            layer.__class__ = type(layer).__bases__[1]


def _child_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has_common_parts(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not (_child_names(attention) == _ATTENTION and _child_names(mlp) == _MLP and is_silu(mlp.act_fn)):
        return False
    fused = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    linear = [*fused[0], attention.o_proj, *fused[1], mlp.down_proj]
    if not all(isinstance(each, nn.Linear) and hasattr(each, "symbiosis_fused") for each in linear):
        return False  # another kind of layer, which adapters do not support either
    if len({each.weight.dtype for each in linear}) > 1:
        return False
    return all(len({id(each.symbiosis_fused) for each in group}) == 1 for group in fused)


def _covers_whole_heads(embeddings: Any, rows: int, width: int) -> bool:
    """Some models rotate only a part of each head, which shows in the embeddings' width."""
    return embeddings is not None and all(tuple(each.shape) == (1, rows, width) for each in embeddings)


class FusedDecoderLayer(nn.Module):
    """Mixed into the class of a decoder layer with a fused forward."""

    symbiosis_fused_forward: FusedForward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *more: Any,
        position_embeddings: Any = None,
        **named: Any,
    ) -> Any:
        fused, rows = self.symbiosis_fused_forward, hidden_states.shape[1]
        if not more and attention_mask is None and _covers_whole_heads(position_embeddings, rows, fused.parts.width):
            found = fused.compute(hidden_states[0], position_embeddings)
            if found is not None:
                return found[None]
        return super().forward(hidden_states, attention_mask, *more, position_embeddings=position_embeddings, **named)
