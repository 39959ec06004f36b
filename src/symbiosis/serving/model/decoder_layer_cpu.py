"""Decoder layers of the usual kind as one straight function, for processors.

A step of a small model that decodes spends a quarter of its time between the
products: in a dozen modules a layer and in small steps such as those of rotary
positions. Plain reference: the layer's own code (`usual`).

R = rows of a pass, D = width of the model, H = query heads, K = key heads, W = width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.kernels.cpu.fused_ops import gated, rms_norm, rotary
from symbiosis.models.rms_norms import epsilon_of
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_ops import AdapterOps, FusedProjection
from symbiosis.serving.model.decoder_layer import AttentionStub, LayerParts, stand_in, usual_layers


class FusedDecoderLayerCpu:
    """The function of one layer."""

    def __init__(self, usual: LayerParts, bank: ActiveAdapters) -> None:
        self.usual, self._bank = usual, bank
        self._norm, self._next_norm = ((norm.weight.detach(), epsilon_of(norm)) for norm in (usual.norm, usual.next_norm))

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        bank, usual, width = self._bank, self.usual, self.usual.width
        parts = (usual.qkv, usual.out, usual.gate_up, usual.down)
        of_qkv, of_out, of_gate_up, of_down = [bank.ops_at(part, is_head=False) for part in parts]
        if (of_qkv is not None and of_qkv.scaled_inputs) or (of_gate_up is not None and of_gate_up.scaled_inputs):
            return None
        bank.check_rows(x_RD.shape[0], is_head=False)
        rows = rms_norm(x_RD, *self._norm)
        qkv_RAW = _product(rows, usual.qkv, of_qkv).view(x_RD.shape[0], -1, width)
        turned = (qkv_RAW.shape[1] + usual.heads) // 2
        qk_RAW, v_RKW = qkv_RAW[:, :turned], qkv_RAW[:, turned:]
        qk_ARW = rotary(qk_RAW, embeddings[0][0], embeddings[1][0]).transpose(0, 1)
        q_HRW, k_KRW = qk_ARW[: usual.heads], qk_ARW[usual.heads :]
        found = usual.memory.attend(usual.number, q_HRW, k_KRW, v_RKW.transpose(0, 1), **usual.asked)
        x_RD = _product(found.reshape(x_RD.shape[0], -1), usual.out, of_out).add_(x_RD)
        rows = rms_norm(x_RD, *self._next_norm)
        gate_up = _product(rows, usual.gate_up, of_gate_up)
        return _product(gated(gate_up), usual.down, of_down).add_(x_RD)


def _product(x_RI: Tensor, together: FusedProjection, effect: AdapterOps | None) -> Tensor:
    if effect is None:
        return together.project(x_RI)
    x_RI = effect.scale_inputs(x_RI)
    y_RO = together.project(x_RI)
    effect.apply(x_RI, y_RO, together.bias_O)
    return y_RO


@torch.inference_mode()
def straighten(model: PreTrainedModel, bank: ActiveAdapters) -> None:
    """Let the layers of this model that can be straight be so. They are adapted, and lie together, already."""
    bank.begin_batch((), ())
    for layer in usual_layers(model):
        if layer.mlp.down_proj.weight.dtype is torch.float32:
            stand_in(layer, lambda usual: FusedDecoderLayerCpu(usual, bank), AttentionStub())
