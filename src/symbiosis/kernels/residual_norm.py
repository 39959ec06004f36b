"""A layer's result added to the rows it came from, and the RMS norm of the sum, in one launch.

R = rows, W = width. A low-rank change of the result may lie beside it (`kept`).
For inference: there is no gradient. Plain reference: `reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.launcher import Launcher
from symbiosis.kernels.lora.deferred import DeferredLora, arguments, facts, joined
from symbiosis.kernels.programmatic_launch import can_be_early, let_next_begin, wait_for_last
from symbiosis.kernels.rms_norm_reference import plain_norm
from symbiosis.kernels.rounding import rounded


def reference(x_RW: Tensor, y_RW: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool) -> tuple[Tensor, Tensor]:
    total_RW = x_RW + y_RW
    return total_RW, plain_norm(total_RW, weight_W, epsilon, twice=twice)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    x, y, weight, total, out, width, x_stride, y_stride, epsilon, change, table, slots, own_bias, change_stride, table_stride,
    KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, TWICE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < width
    kind: tl.constexpr = out.dtype.element_ty
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    before = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(y + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    if KEPT:
        has, stretch = facts(table, slots, row, 0, table_stride)
        value = joined(value, change, own_bias, has, stretch, row, column, column, mask, change_stride, kind, HAS_BIAS)
    value = rounded(before + value, kind)
    tl.store(total + row * width + column, value.to(kind), mask=mask)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    if TWICE:
        value = rounded(value, kind)
    tl.store(out + row * width + column, (value * scale).to(kind), mask=mask)


_launch = Launcher(_add)


def residual_norm(
    x_RW: Tensor, y_RW: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool, kept: DeferredLora | None = None
) -> tuple[Tensor, Tensor]:
    """The sum and its norm. Rows may lie at any distance."""
    (rows, width), early = x_RW.shape, can_be_early(x_RW.device)
    assert x_RW.shape == y_RW.shape, (x_RW.shape, y_RW.shape)
    assert x_RW.stride(1) == y_RW.stride(1) == 1, (x_RW.stride(), y_RW.stride())
    total_RW, out_RW = (torch.empty(rows, width, dtype=x_RW.dtype, device=x_RW.device) for _ in range(2))
    wide = int(triton.next_power_of_2(width))
    if rows:
        _launch(
            (rows, 1, 1), x_RW, x_RW, y_RW, weight_W, total_RW, out_RW, width, x_RW.stride(0), y_RW.stride(0), epsilon,
            *arguments(kept, x_RW), early, twice, wide,
            warps=min(16, max(1, wide // 512)), early=early,
        )  # fmt: skip
    return total_RW, out_RW
