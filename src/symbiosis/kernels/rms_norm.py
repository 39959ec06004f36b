"""RMS norm with its weight, in one launch forward and one backward. The weight is frozen: it gets no gradient.

R = rows, W = width. Models differ in where they round: most round the normalised row before the product with the
weight (`twice`). Plain reference: `rms_norm_reference`.
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

_MAX_WIDTH = 16384


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, width, stride, epsilon, PDL: tl.constexpr, TWICE: tl.constexpr, WIDTH: tl.constexpr
):
    launch_dependents(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    if TWICE:
        value = rounded(value, out.dtype.element_ty)
    tl.store(out + row * width + column, (value * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_backward(x, weight, upstream, out, width, stride, epsilon, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(upstream + row * width + column, mask=mask, other=0.0).to(tl.float32) * scale
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    value *= inverse
    grad = inverse * (grad - value * (tl.sum(grad * value, 0) / width))
    tl.store(out + row * width + column, grad.to(out.dtype.element_ty), mask=mask)


def fits(x: Tensor, weight_W: Tensor) -> bool:
    """Whether the kernel supports these. The weight must not need a gradient."""
    wide = x.shape[-1]
    even = x.dim() >= 2 and x.stride(-1) == 1 and x.numel() > 0 and wide == weight_W.numel() <= _MAX_WIDTH
    return even and all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def _warps(width: int) -> int:
    return min(16, max(1, int(triton.next_power_of_2(width)) // 512))


_launch_forward, _launch_backward = Launcher(_rms_norm), Launcher(_rms_norm_backward)


def _launch(x: Tensor, weight_W: Tensor, epsilon: float, twice: bool) -> Tensor:
    width, pdl = weight_W.numel(), supports_pdl(x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(
        (x.numel() // width, 1, 1), x, x, weight_W, out, width, x.stride(-2), epsilon, pdl, twice,
        triton.next_power_of_2(width), warps=_warps(width), pdl=pdl,
    )  # fmt: skip
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_W: Tensor, epsilon: float, twice: bool) -> Tensor:
        ctx.save_for_backward(x, weight_W)
        ctx.epsilon = epsilon
        return _launch(x, weight_W, epsilon, twice)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight_W = ctx.saved_tensors
        width, upstream = weight_W.numel(), upstream.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch_backward(
            (x.numel() // width, 1, 1), x, x, weight_W, upstream, out, width, x.stride(-2), ctx.epsilon,
            triton.next_power_of_2(width), warps=_warps(width),
        )  # fmt: skip
        return out, None, None, None


def rms_norm(x: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool) -> Tensor:
    """Computes what `rms_norm_reference` does. x is [..., W], its rows at equal distances."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _RmsNorm.apply(x, weight_W, epsilon, twice)  # type: ignore[no-untyped-call,no-any-return]
    return _launch(x, weight_W, epsilon, twice)
