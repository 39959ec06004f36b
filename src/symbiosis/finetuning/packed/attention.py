"""Attention over packed rows: each sequence attends to itself, and to an adapter's prefix before it.

R = rows of the batch, S = rows of a sequence, T = virtual tokens, H = query heads, K = key heads, D = width of a head.

The reference is one call per sequence: it computes nothing in vain, and no sequence reads another's numbers. (A mask over
all rows would let one sequence's overflow through: 0 · NaN is NaN.) On a GPU, plainly causal sequences are one call that
separates them itself: a batch if their lengths are equal, `varlen_flash` if not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.errors import CannotTrain
from symbiosis.finetuning.packed import varlen_flash
from symbiosis.finetuning.packed.batch import PackedBatch
from symbiosis.finetuning.packed.context import PassContext
from symbiosis.models.attention_registry import register_attention

NAME = "symbiosis_packed"


def use_packed_attention(model: PreTrainedModel, context: PassContext) -> None:
    """Let every attention module of this model use the context's batch. Raises `CannotTrain`."""
    register_attention(NAME, _attend_layer, CannotTrain)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "symbiosis_context", context)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:  # its own attention does not separate packed sequences
        raise CannotTrain(f"{type(model).__name__} does not support another attention implementation: it cannot be packed")


def _attend_packed(
    q_HRD: Tensor,
    k_KRD: Tensor,
    v_KRD: Tensor,
    batch: PackedBatch,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """The attention of each row, [H, R, D], under autograd."""
    spans = batch.spans
    plain = cap is None and (window is None or window >= batch.longest) and all(s.prefix_L2HTD is None for s in spans)
    is_even = all(span.rows == batch.longest for span in spans)
    if plain and q_HRD.is_cuda:
        if is_even:
            return attend_batched(q_HRD, k_KRD, v_KRD, len(spans), scale)
        if varlen_flash.supports(q_HRD):
            return varlen_flash.attention(q_HRD, k_KRD, v_KRD, batch.edges_S, batch.longest, scale)
    batch.by_lengths |= not is_even
    sizes = [span.rows for span in spans]
    results: list[Tensor] = []
    for span, q, k, v in zip(spans, *(torch.split(x, sizes, 1) for x in (q_HRD, k_KRD, v_KRD)), strict=True):
        if not span.rows:
            continue
        before = 0
        if span.prefix_L2HTD is not None:
            prefix = span.prefix_L2HTD[layer].to(k.dtype)
            before = prefix.shape[2]
            k, v = torch.cat([prefix[0], k], dim=1), torch.cat([prefix[1], v], dim=1)  # noqa: PLW2901
        # a window that covers the sequence has no effect
        reach = window if window is not None and window < before + span.rows else None
        allowed = None
        if before or reach is not None or cap is not None:
            key = (span.rows, before, reach)
            if key not in batch.masks:
                batch.masks[key] = _mask(*key, q.device)
            allowed = batch.masks[key]
        results.append(_attend(q[None], k[None], v[None], allowed, scale=scale, cap=cap)[0])
    return torch.cat(results, dim=1)


def attend_batched(q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, sequences: int, scale: float) -> Tensor:
    """Causal attention of sequences of one length."""
    q, k, v = (x.view(x.shape[0], sequences, -1, x.shape[2]).transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
    return _attend(q, k, v, None, scale=scale, cap=None).transpose(0, 1).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, cap: float | None) -> Tensor:
    """One sequence, [1, H, S, D], or several of one length. Causal if `allowed` is None."""
    if allowed is None or cap is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=grouped
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = (cap * torch.tanh(scores / cap)).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def _mask(rows: int, before: int, reach: int | None, device: torch.device) -> Tensor:
    query = torch.arange(before, before + rows, device=device)[:, None]
    key = torch.arange(before + rows, device=device)[None, :]
    allowed = key <= query
    return allowed if reach is None else allowed & (key > query - reach)


def _attend_layer(
    module: nn.Module, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None, cap: float | None
) -> Tensor:
    context: PassContext = module.symbiosis_context  # type: ignore[assignment]
    return _attend_packed(*qkv, context.batch, layer, scale, window, cap).transpose(0, 1)
