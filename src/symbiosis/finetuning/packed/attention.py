"""Attention over packed rows: each sequence attends to itself, and to what an adapter puts in front of it.

R = rows of the pass, S = rows of a sequence, T = virtual tokens, H = query heads, K = key heads, D = width of a head.

One call for each sequence: nothing is computed that is thrown away, and no sequence sees a number of another's.
(A mask over all rows would let an overflow of one through: 0 · NaN is NaN.) On a GPU one call for all plainly causal
sequences, which keeps them apart by itself: as a batch if they are of one length, by `flash` if not. The calls one by
one are their reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from symbiosis.errors import CannotTrain
from symbiosis.finetuning.packed import varlen_flash
from symbiosis.finetuning.packed.batch import PackedBatch
from symbiosis.finetuning.packed.context import PassContext
from symbiosis.models.attention_checks import no_mask, unsupported_reason

NAME = "symbiosis_packed"


def use_packed_attention(model: PreTrainedModel, stage: PassContext) -> None:
    """Let every attention module of this model find its sequences on the stage. Raises `CannotTrain`."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, no_mask)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "symbiosis_stage", stage)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:  # it would keep sequences apart by a mask, if at all
        raise CannotTrain(f"{type(model).__name__} does not let its attention be chosen: it cannot be packed")


def attend(
    q_HRD: Tensor,
    k_KRD: Tensor,
    v_KRD: Tensor,
    pack: PackedBatch,
    *,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """What each row reads from its sequence, [H, R, D], under autograd."""
    spans = pack.spans
    plain = cap is None and (window is None or window >= pack.longest) and all(s.prefix_L2HTD is None for s in spans)
    alike = all(span.rows == pack.longest for span in spans)
    if plain and q_HRD.is_cuda:
        if alike:
            return batched(q_HRD, k_KRD, v_KRD, len(spans), scale)
        if varlen_flash.takes(q_HRD):
            return varlen_flash.attention(q_HRD, k_KRD, v_KRD, pack.edges_S, pack.longest, scale)
    pack.by_lengths |= not alike
    sizes = [span.rows for span in spans]
    found: list[Tensor] = []
    for span, q, k, v in zip(spans, *(torch.split(x, sizes, 1) for x in (q_HRD, k_KRD, v_KRD)), strict=True):
        if not span.rows:
            continue
        before = 0
        if span.prefix_L2HTD is not None:
            front = span.prefix_L2HTD[layer].to(k.dtype)
            before = front.shape[2]
            k, v = torch.cat([front[0], k], dim=1), torch.cat([front[1], v], dim=1)  # noqa: PLW2901
        # a window as long as the sequence is none
        reach = window if window is not None and window < before + span.rows else None
        allowed = None
        if before or reach is not None or cap is not None:
            key = (span.rows, before, reach)
            if key not in pack.masks:
                pack.masks[key] = _allowed(*key, q.device)
            allowed = pack.masks[key]
        found.append(_one(q[None], k[None], v[None], allowed, scale=scale, cap=cap)[0])
    return torch.cat(found, dim=1)


def batched(q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, sequences: int, scale: float) -> Tensor:
    """Sequences of one length, plainly causal."""
    q, k, v = (x.view(x.shape[0], sequences, -1, x.shape[2]).transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
    return _one(q, k, v, None, scale=scale, cap=None).transpose(0, 1).flatten(1, 2)


def _one(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, cap: float | None) -> Tensor:
    """One sequence, [1, H, S, D], or several alike; without a mask, plainly causal."""
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


def _allowed(rows: int, before: int, reach: int | None, device: torch.device) -> Tensor:
    place = torch.arange(before, before + rows, device=device)[:, None]
    other = torch.arange(before + rows, device=device)[None, :]
    allowed = other <= place
    return allowed if reach is None else allowed & (other > place - reach)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    reason = unsupported_reason(module, query, attention_mask, sliding_window, more)
    if reason is not None:
        raise CannotTrain(f"{reason}, which packed passes do not have")
    stage: PassContext = module.symbiosis_stage  # type: ignore[assignment]
    found_HRD = attend(
        query[0],
        key[0],
        value[0],
        stage.pack,
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        cap=softcap,
    )
    return found_HRD.transpose(0, 1)[None], None
