"""Attention over parts of the context, and the sum of such parts. Plain reference: attention over the whole context.

A part's result is its softmax-weighted values and the log of the sum of its weights. Two parts combine exactly, so the
context can pass through the device in segments.

B = sequences, H = query heads, K = key heads, R = query rows, S = tokens of a segment, D = width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_SCORES = 1 << 26  # of one plain product
_HALF = torch.bfloat16, torch.float16


class PartialAttention(NamedTuple):
    """In float32."""

    out_BHRD: Tensor
    logsum_BHR: Tensor
    """-inf: no token was attended to, and the result is zero."""

    def combine(self, other: PartialAttention) -> PartialAttention:
        """The result over the tokens of both."""
        highest = torch.maximum(self.logsum_BHR, other.logsum_BHR)
        base = torch.where(highest.isneginf(), 0.0, highest)  # -inf - -inf is NaN
        one, two = (self.logsum_BHR - base).exp(), (other.logsum_BHR - base).exp()
        total = one + two
        share = torch.where(total > 0, one / total, 0.0), torch.where(total > 0, two / total, 0.0)
        out = self.out_BHRD * share[0][..., None] + other.out_BHRD * share[1][..., None]
        return PartialAttention(out, base + total.log())


def attend_segment(
    q_BHRD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    allowed_BRS: Tensor | None = None,
    causal: bool = False,
) -> PartialAttention:
    """Attention over a segment: to all of it, to those `allowed` (B may be 1), or `causal`: rows are the segment's tokens."""
    if cap is None and allowed_BRS is None and (found := _attend_flash(q_BHRD, k_BKSD, v_BKSD, scale, causal)) is not None:
        return found
    if causal:
        rows = torch.arange(k_BKSD.shape[2], device=q_BHRD.device)
        lower = (rows[None, :] <= rows[:, None])[None]
        allowed_BRS = lower if allowed_BRS is None else lower & allowed_BRS
    return attend_segment_reference(q_BHRD, k_BKSD, v_BKSD, scale=scale, cap=cap, allowed_BRS=allowed_BRS)


def attend_segment_reference(
    q_BHRD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, scale: float, cap: float | None, allowed_BRS: Tensor | None
) -> PartialAttention:
    """By plain products in float32, some rows at a time."""
    batch, heads, rows, _ = q_BHRD.shape
    groups, tokens = heads // k_BKSD.shape[1], k_BKSD.shape[2]
    k, v = k_BKSD.float(), v_BKSD.float()
    step = max(1, _MAX_SCORES // max(1, batch * heads * tokens))
    outs, logsums = [], []
    for start in range(0, rows, step):
        q = q_BHRD[:, :, start : start + step].float()
        q = q.reshape(batch, -1, groups, *q.shape[2:])  # [B, K, G, R, D]
        scores = q @ k[:, :, None].transpose(-1, -2) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if allowed_BRS is not None:
            scores = scores.masked_fill(~allowed_BRS[:, None, None, start : start + step], float("-inf"))
        logsum = scores.logsumexp(-1)
        weights = (scores - torch.where(logsum.isneginf(), 0.0, logsum)[..., None]).exp()
        outs.append((weights @ v[:, :, None]).flatten(1, 2))
        logsums.append(logsum.flatten(1, 2))
    return PartialAttention(torch.cat(outs, 2), torch.cat(logsums, 2))


def _attend_flash(q_BHRD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, causal: bool) -> PartialAttention | None:
    """By torch's flash attention, which reports the log of the sum too; None where it does not support these."""
    batch, heads, rows, width = q_BHRD.shape
    is_cuda = q_BHRD.is_cuda
    if v_BKSD.shape[-1] != width or (is_cuda and (q_BHRD.dtype not in _HALF or width % 8 or width > 256)):
        return None
    if not is_cuda and (q_BHRD.device.type != "cpu" or q_BHRD.dtype not in (torch.float32, *_HALF)):
        return None
    groups = heads // k_BKSD.shape[1]
    if causal:  # rows of several heads cannot be one sequence: keys and values of the own chunk are repeated
        k_BKSD, v_BKSD = (x.repeat_interleave(groups, 1) for x in (k_BKSD, v_BKSD)) if groups > 1 else (k_BKSD, v_BKSD)
    else:
        q_BHRD = q_BHRD.reshape(batch, -1, groups * rows, width)
    if is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, logsum = flash(q_BHRD, k_BKSD, v_BKSD, 0.0, causal, False, scale=scale)[:2]
    else:
        out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHRD, k_BKSD, v_BKSD, 0.0, causal, scale=scale
        )
    return PartialAttention(out.reshape(batch, heads, rows, width).float(), logsum.reshape(batch, heads, rows).float())
