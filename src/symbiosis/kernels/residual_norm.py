"""Residual addition of a layer's output, and the RMS norm of the sum, in one launch.

R = rows, W = width. The output may have a LoRA delta (`deferred`). For inference: no gradient. Plain reference:
`reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.launcher import Launcher
from symbiosis.kernels.lora.deferred import DeferredLora, add_delta, delta_arguments, find_delta
from symbiosis.kernels.programmatic_launch import launch_dependents, supports_pdl, wait_for_previous
from symbiosis.kernels.rms_norm_reference import rms_norm_reference
from symbiosis.kernels.rounding import rounded


def reference(x_RW: Tensor, y_RW: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool) -> tuple[Tensor, Tensor]:
    total_RW = x_RW + y_RW
    return total_RW, rms_norm_reference(total_RW, weight_W, epsilon, twice=twice)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _residual_norm(  # type: ignore[no-untyped-def]
    x, y, weight, total, out, width, x_stride, y_stride, epsilon, delta, table, slots, base_bias, delta_stride, table_stride,
    DEFERRED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, TWICE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < width
    kind: tl.constexpr = out.dtype.element_ty
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    before = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(y + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    if DEFERRED:
        has, scale_at = find_delta(table, slots, row, 0, table_stride)
        value = add_delta(value, delta, base_bias, has, scale_at, row, column, column, mask, delta_stride, kind, HAS_BIAS)
    value = rounded(before + value, kind)
    tl.store(total + row * width + column, value.to(kind), mask=mask)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    if TWICE:
        value = rounded(value, kind)
    tl.store(out + row * width + column, (value * scale).to(kind), mask=mask)


_launch = Launcher(_residual_norm)


def residual_norm(
    x_RW: Tensor, y_RW: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool, deferred: DeferredLora | None = None
) -> tuple[Tensor, Tensor]:
    """The sum and its norm. Rows may have any stride."""
    (rows, width), pdl = x_RW.shape, supports_pdl(x_RW.device)
    assert x_RW.shape == y_RW.shape, (x_RW.shape, y_RW.shape)
    assert x_RW.stride(1) == y_RW.stride(1) == 1, (x_RW.stride(), y_RW.stride())
    total_RW, out_RW = (torch.empty(rows, width, dtype=x_RW.dtype, device=x_RW.device) for _ in range(2))
    wide = int(triton.next_power_of_2(width))
    if rows:
        _launch(
            (rows, 1, 1), x_RW, x_RW, y_RW, weight_W, total_RW, out_RW, width, x_RW.stride(0), y_RW.stride(0), epsilon,
            *delta_arguments(deferred, x_RW), pdl, twice, wide,
            warps=min(16, max(1, wide // 512)), pdl=pdl,
        )  # fmt: skip
    return total_RW, out_RW
