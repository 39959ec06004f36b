"""Decoder layers of the common kind as one function, for CPUs.

A decode step of a small model spends a quarter of its time between the matrix products: in a dozen modules a layer, and in
small operations such as rotary embedding. Reference: the layer's own code.

R = rows of a batch, D = width of the model, H = query heads, K = key heads, W = width of a head, A = all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.kernels.cpu.fused_ops import residual_norm, rms_norm, rotary_reference, silu_mul
from symbiosis.models.rms_norms import epsilon_of
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_ops import AdapterOps, FusedProjection
from symbiosis.serving.model.decoder_layer import AttentionStub, LayerParts, find_decoder_layers, fuse_layer


class FusedDecoderLayerCpu:
    """The fused forward of one layer."""

    def __init__(self, parts: LayerParts, adapters: ActiveAdapters) -> None:
        self.parts, self._adapters = parts, adapters
        self._norm, self._next_norm = ((norm.weight.detach(), epsilon_of(norm)) for norm in (parts.norm, parts.next_norm))

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        adapters, parts, width = self._adapters, self.parts, self.parts.width
        projections = (parts.qkv, parts.out, parts.gate_up, parts.down)
        of_qkv, of_out, of_gate_up, of_down = [adapters.ops_at(each, is_head=False) for each in projections]
        if (of_qkv is not None and of_qkv.scaled_inputs) or (of_gate_up is not None and of_gate_up.scaled_inputs):
            return None
        adapters.check_rows(x_RD.shape[0], is_head=False)
        rows = rms_norm(x_RD, *self._norm)
        qkv_RAW = _project(rows, parts.qkv, of_qkv).view(x_RD.shape[0], -1, width)
        found = parts.kv_cache.rotate_store_attend_cpu(parts.number, qkv_RAW, embeddings, **parts.attention_options)
        delta_RD, x_RD = x_RD, _project(found.reshape(x_RD.shape[0], -1), parts.out, of_out)
        rows = residual_norm(x_RD, delta_RD, *self._next_norm)
        gate_up = _project(rows, parts.gate_up, of_gate_up)
        return _project(silu_mul(gate_up), parts.down, of_down).add_(x_RD)


class _CpuAttentionStub(AttentionStub):
    def rotate_store_attend_cpu(self, layer: int, qkv_RAW: Tensor, embeddings: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        num_keys = self.heads[1]
        q_RHW, k_RKW, v_RKW = torch.split(qkv_RAW, [qkv_RAW.shape[1] - 2 * num_keys, num_keys, num_keys], 1)
        q_RHW, k_RKW = (rotary_reference(x, embeddings[0][0], embeddings[1][0]) for x in (q_RHW, k_RKW))
        return self.attend(layer, *(x.transpose(0, 1) for x in (q_RHW, k_RKW, v_RKW)), **options)


def _project(x_RI: Tensor, projection: FusedProjection, ops: AdapterOps | None) -> Tensor:
    if ops is None:
        return projection.leave(projection.project(x_RI))
    x_RI = ops.scale_inputs(x_RI)
    y_RO = projection.project(x_RI)
    ops.apply(x_RI, y_RO, projection.bias_O)
    return projection.leave(y_RO)


@torch.inference_mode()
def fuse_layers_cpu(model: PreTrainedModel, adapters: ActiveAdapters) -> None:
    """Fuse the float32 decoder layers of this model. Their projections must be adapted and fused already."""
    adapters.begin_batch((), ())
    for layer in find_decoder_layers(model):
        if layer.mlp.down_proj.weight.dtype is torch.float32:
            fuse_layer(layer, lambda parts: FusedDecoderLayerCpu(parts, adapters), _CpuAttentionStub())
