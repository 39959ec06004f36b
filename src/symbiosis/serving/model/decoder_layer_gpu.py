"""Decoder layers of the common kind in nine kernel launches instead of twelve, for GPUs; with adapters, instead of sixteen.

A decode step reads all weights once, and idles between any two kernels. So one kernel does all work between two matrix
products: it adds the LoRA delta and the residual, and norms the sum, for the layer's MLP or for the next layer. Reference:
the layer's own code.

R = rows of a batch, D = width of the model, W = width of a head.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.distributed.partition import Style
from symbiosis.models.patches.fused_ops import FusedNorm
from symbiosis.models.rms_norms import epsilon_of
from symbiosis.serving.lora.batch_adapters import ActiveAdapters, DeferredDelta
from symbiosis.serving.lora.lora_ops import FusedProjection
from symbiosis.serving.model.decoder_layer import AttentionStub, LayerParts, find_decoder_layers, fuse_layer


class FusedDecoderLayerGpu:
    """The fused forward of one layer."""

    def __init__(self, parts: LayerParts, adapters: ActiveAdapters) -> None:
        if not all(_fits(norm) for norm in (parts.norm, parts.next_norm)):
            raise ValueError("norms of another kind")
        self.parts, self._adapters = parts, adapters
        self.next_layer: FusedDecoderLayerGpu | None = None
        """The layer whose input is this layer's result."""
        self._normed: tuple[Tensor, Tensor] | None = None
        """The next input, and its norm by the layer before. The reference keeps the input's memory from reuse."""

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        from symbiosis.kernels.silu_mul import silu_mul

        adapters, parts, next_layer = self._adapters, self.parts, self.next_layer
        projections = (parts.qkv, parts.out, parts.gate_up, parts.down)
        if any(adapters.ops_at(each, is_head=False) is not None for each in projections):
            self._normed = None
            return None
        adapters.check_rows(x_RD.shape[0], is_head=False)
        qkv_RO, deferred = self._project(self._norm(x_RD), parts.qkv)
        delta = _resolve(deferred, qkv_RO)
        found = parts.kv_cache.rotate_store_attend(parts.number, qkv_RO, embeddings, delta, **parts.attention_options)
        y_RD, deferred = self._project(found.reshape(x_RD.shape[0], -1), parts.out)
        x_RD, rows = _add_and_norm(x_RD, y_RD, deferred, parts.next_norm)
        gate_up, deferred = self._project(rows, parts.gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        y_RD, deferred = self._project(silu_mul(gate, up, _resolve(deferred, gate_up)), parts.down)
        if next_layer is None:
            if deferred is not None:
                deferred.add(y_RD)
            return x_RD + y_RD
        next_layer._normed = _add_and_norm(x_RD, y_RD, deferred, next_layer.parts.norm)
        return next_layer._normed[0]

    def _norm(self, x_RD: Tensor) -> Tensor:
        """The norm by the layer before, if its result is this very tensor."""
        normed, self._normed = self._normed, None
        if normed is not None and (normed[0].data_ptr(), normed[0].shape) == (x_RD.data_ptr(), x_RD.shape):
            return normed[1]
        return self.parts.norm(x_RD)  # type: ignore[no-any-return]

    def _project(self, x_RI: Tensor, projection: FusedProjection) -> tuple[Tensor, DeferredDelta | None]:
        """The product without the LoRA delta, and the delta."""
        deferred = self._adapters.begin_delta(x_RI, projection, is_head=False)
        y_RO = projection.project(x_RI)
        if projection.parallel is None or projection.parallel.style is Style.COLUMN:
            return y_RO, deferred
        if deferred is not None:
            deferred.add(y_RO)  # before the sum over shards
        return projection.leave(y_RO), None


def _resolve(deferred: DeferredDelta | None, y_RO: Tensor) -> Any:
    """The delta that the next kernel has to add, if any."""
    return None if deferred is None else deferred.resolve(y_RO)


def _add_and_norm(x_RD: Tensor, y_RD: Tensor, deferred: DeferredDelta | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The residual sum with its delta, and the norm of it."""
    from symbiosis.kernels.residual_norm import residual_norm

    delta = _resolve(deferred, y_RD)
    return residual_norm(x_RD, y_RD, norm.weight, epsilon_of(norm), twice=norm.symbiosis_twice, deferred=delta)


def _fits(norm: Any) -> bool:
    from symbiosis.kernels.rms_norm import fits

    return isinstance(norm, FusedNorm) and fits(norm.weight[None], norm.weight)


class _GpuAttentionStub(AttentionStub):
    def rotate_store_attend(
        self, layer: int, qkv_RO: Tensor, embeddings: tuple[Tensor, Tensor], delta: Any, **options: Any
    ) -> Tensor:
        from symbiosis.kernels.rotary import reference

        heads, key_heads = self.heads  # as recorded from the layer's own code
        qkv_ARW = qkv_RO.view(len(qkv_RO), heads + 2 * key_heads, -1).transpose(0, 1)
        q_HRW, k_KRW, v_KRW = qkv_ARW.tensor_split([heads, heads + key_heads])
        q_1HRW, k_1KRW = reference(q_HRW[None], k_KRW[None], *embeddings)
        return self.attend(layer, q_1HRW[0], k_1KRW[0], v_KRW, **options)


@torch.inference_mode()
def fuse_layers_gpu(model: PreTrainedModel, adapters: ActiveAdapters) -> None:
    """Fuse decoder layers of this model. Their projections must be adapted and fused already, and their norms fused."""
    adapters.begin_batch((), ())
    fused: dict[Any, Any] = {
        layer: fuse_layer(layer, lambda parts: FusedDecoderLayerGpu(parts, adapters), _GpuAttentionStub())
        for layer in find_decoder_layers(model)
    }
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer, after in itertools.pairwise(layers):
                if fused.get(layer) is not None:
                    fused[layer].next_layer = fused.get(after)
