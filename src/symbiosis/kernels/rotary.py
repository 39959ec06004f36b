"""Rotary positions of queries and keys, in one launch forward and one backward.

B = sequences, H = heads, T = tokens, D = width of a head. Plain reference: `reference`, which is what most models of
transformers do in ten small kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.first_order import first_order
from symbiosis.kernels.launcher import Launcher
from symbiosis.kernels.programmatic_launch import launch_dependents, supports_pdl, wait_for_previous
from symbiosis.kernels.rounding import rounded


def reference(q_BHTD: Tensor, k_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    cos, sin = cos_BTD[:, None], sin_BTD[:, None]
    return q_BHTD * cos + rotate_half(q_BHTD) * sin, k_BHTD * cos + rotate_half(k_BHTD) * sin


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, y, cos_1, cos_2, sin_1, sin_2, heads, half, xh, yh, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Rotate all heads of one token, from `x` to `y`."""
    head, column = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (column < half)
    first = tl.load(x + head * xh + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + head * xh + column + half, mask=mask, other=0.0).to(tl.float32)
    # each product is rounded before the sum, as in the reference
    kind: tl.constexpr = y.dtype.element_ty
    above, below = rounded(first * cos_1, kind), rounded(second * cos_2, kind)
    if BACKWARD:
        above += rounded(second * sin_2, kind)
        below -= rounded(first * sin_1, kind)
    else:
        above -= rounded(second * sin_1, kind)
        below += rounded(first * sin_2, kind)
    tl.store(y + head * yh + column, above.to(kind), mask=mask)
    tl.store(y + head * yh + column + half, below.to(kind), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    q, k, q_out, k_out, cos, sin, tokens, half,
    q_heads, qb, qh, qt, qob, qoh, qot,
    k_heads, kb, kh, kt, kob, koh, kot,
    cb, ct, sb, st,
    PDL: tl.constexpr, BACKWARD: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    b, t = token // tokens, token % tokens
    column = tl.arange(0, HALF)[None, :]
    mask = column < half
    cos_1 = tl.load(cos + b * cb + t * ct + column, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + b * cb + t * ct + column + half, mask=mask, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + b * sb + t * st + column, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + b * sb + t * st + column + half, mask=mask, other=0.0).to(tl.float32)
    q, q_out = q + b * qb + t * qt, q_out + b * qob + t * qot
    _rotate_heads(q, q_out, cos_1, cos_2, sin_1, sin_2, q_heads, half, qh, qoh, BACKWARD, Q_HEADS, HALF)
    k, k_out = k + b * kb + t * kt, k_out + b * kob + t * kot
    _rotate_heads(k, k_out, cos_1, cos_2, sin_1, sin_2, k_heads, half, kh, koh, BACKWARD, K_HEADS, HALF)


_launch_rotate = Launcher(_rotate)


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, tokens, width = q.shape
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    is_shared = cos.shape[0] == 1  # one table for all sequences
    pdl, strides = supports_pdl(q.device), [x.stride()[:3] for x in (q, q_out, k, k_out)]
    _launch_rotate(
        (batch * tokens, 1, 1), q, q, k, q_out, k_out, cos, sin, tokens, width // 2,
        q_heads, *strides[0], *strides[1], k.shape[1], *strides[2], *strides[3],
        0 if is_shared else cos.stride(0), cos.stride(1), 0 if is_shared else sin.stride(0), sin.stride(1),
        pdl, backward, triton.next_power_of_2(q_heads), triton.next_power_of_2(k.shape[1]), triton.next_power_of_2(width // 2),
        pdl=pdl,
    )  # fmt: skip
    return q_out, k_out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, backward=False)

    @staticmethod
    @first_order
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_launch(q, k, *ctx.saved_tensors, backward=True), None, None


def fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel supports these."""
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and q.dtype is k.dtype is cos.dtype is sin.dtype):
        return False
    batch, _, tokens, width = q.shape
    tables = cos.shape == sin.shape and tuple(cos.shape[1:]) == (tokens, width) and cos.shape[0] in (1, batch)
    same = (k.shape[0], *k.shape[2:]) == (batch, tokens, width) and width % 2 == 0
    return tables and same and cos.stride(-1) == sin.stride(-1) == 1 and not (cos.requires_grad or sin.requires_grad)


def rotary(q_BHTD: Tensor, k_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Both rotated. cos and sin, [B or 1, T, D], get no gradient."""
    if torch.is_grad_enabled() and (q_BHTD.requires_grad or k_BHTD.requires_grad):
        return _Rotary.apply(q_BHTD, k_BHTD, cos_BTD, sin_BTD)  # type: ignore[no-untyped-call,no-any-return]
    return _launch(q_BHTD, k_BHTD, cos_BTD, sin_BTD, backward=False)
