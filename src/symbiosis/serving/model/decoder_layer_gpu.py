"""Decoder layers of the usual kind in nine launches instead of twelve, for GPUs; with adapters, instead of sixteen.

A pass that decodes reads all weights once, and waits between any two kernels.
So what comes after a product is one kernel that does all of it up to the next:
adds what adapters changed beside the product, adds the rows from before and
norms the sum, for the layer's own MLP or for the layer that follows. Plain
reference: the layer's own code (`usual`).

R = rows of a pass, D = width of the model, W = width of a head.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.models.patches.fused_ops import FusedNorm
from symbiosis.models.rms_norms import epsilon_of
from symbiosis.serving.lora.batch_adapters import ActiveAdapters, DeferredDelta
from symbiosis.serving.lora.lora_ops import FusedProjection
from symbiosis.serving.model.decoder_layer import AttentionStub, LayerParts, stand_in, usual_layers


class FusedDecoderLayerGpu:
    """The function of one layer."""

    def __init__(self, usual: LayerParts, bank: ActiveAdapters) -> None:
        if not all(_fits(norm) for norm in (usual.norm, usual.next_norm)):
            raise ValueError("norms of another kind")
        self.usual, self._bank = usual, bank
        self.follower: FusedDecoderLayerGpu | None = None
        """The layer whose rows are this one's result."""
        self._ready: tuple[Tensor, Tensor] | None = None
        """Rows that come next, and their norm. Held so that nothing else can lie there; nobody writes to them in between."""

    def compute(self, x_RD: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor | None:
        from symbiosis.kernels.silu_mul import gated

        bank, usual, follower = self._bank, self.usual, self.follower
        parts = (usual.qkv, usual.out, usual.gate_up, usual.down)
        if any(bank.ops_at(part, is_head=False) is not None for part in parts):
            self._ready = None
            return None
        bank.check_rows(x_RD.shape[0], is_head=False)
        qkv_RO, pending = self._product(self._normed(x_RD), usual.qkv)
        found = usual.memory.enter_and_attend(usual.number, qkv_RO, embeddings, _settled(pending, qkv_RO), **usual.asked)
        y_RD, pending = self._product(found.reshape(x_RD.shape[0], -1), usual.out)
        x_RD, rows = _summed(x_RD, y_RD, pending, usual.next_norm)
        gate_up, pending = self._product(rows, usual.gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        y_RD, pending = self._product(gated(gate, up, _settled(pending, gate_up)), usual.down)
        if follower is None:
            if pending is not None:
                pending.add(y_RD)
            return x_RD + y_RD
        follower._ready = _summed(x_RD, y_RD, pending, follower.usual.norm)
        return follower._ready[0]

    def _normed(self, x_RD: Tensor) -> Tensor:
        """By the layer before, if it has given these very rows."""
        ready, self._ready = self._ready, None
        if ready is not None and (ready[0].data_ptr(), ready[0].shape) == (x_RD.data_ptr(), x_RD.shape):
            return ready[1]
        return self.usual.norm(x_RD)  # type: ignore[no-any-return]

    def _product(self, x_RI: Tensor, together: FusedProjection) -> tuple[Tensor, DeferredDelta | None]:
        """Of these layers, and what adapters do to it, which is not added yet."""
        pending = self._bank.begin_delta(x_RI, together, is_head=False)
        return together.project(x_RI), pending


def _settled(pending: DeferredDelta | None, y_RO: Tensor) -> Any:
    """What is kept for the next kernel, if anything."""
    return None if pending is None else pending.resolve(y_RO)


def _summed(x_RD: Tensor, y_RD: Tensor, pending: DeferredDelta | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Rows with what a layer gives for them, and the norm of that."""
    from symbiosis.kernels.residual_norm import residual_norm

    kept = _settled(pending, y_RD)
    return residual_norm(x_RD, y_RD, norm.weight, epsilon_of(norm), twice=norm.symbiosis_twice, kept=kept)


def _fits(norm: Any) -> bool:
    from symbiosis.kernels.rms_norm import fits

    return isinstance(norm, FusedNorm) and fits(norm.weight[None], norm.weight)


class _Witness(AttentionStub):
    def enter_and_attend(
        self, layer: int, qkv_RO: Tensor, embeddings: tuple[Tensor, Tensor], kept: Any, **asked: Any
    ) -> Tensor:
        from symbiosis.kernels.rotary import reference

        heads, key_heads = self.heads  # as the layer's own code has told
        qkv_ARW = qkv_RO.view(len(qkv_RO), heads + 2 * key_heads, -1).transpose(0, 1)
        q_HRW, k_KRW, v_KRW = qkv_ARW.tensor_split([heads, heads + key_heads])
        q_1HRW, k_1KRW = reference(q_HRW[None], k_KRW[None], *embeddings)
        return self.attend(layer, q_1HRW[0], k_1KRW[0], v_KRW, **asked)


@torch.inference_mode()
def shorten(model: PreTrainedModel, bank: ActiveAdapters) -> None:
    """Let the layers of this model that can be short be so. They are adapted, lie together and have fused norms already."""
    bank.begin_batch((), ())
    shorts: dict[Any, Any] = {
        layer: stand_in(layer, lambda usual: FusedDecoderLayerGpu(usual, bank), _Witness()) for layer in usual_layers(model)
    }
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer, after in itertools.pairwise(layers):
                if shorts.get(layer) is not None:
                    shorts[layer].follower = shorts.get(after)
