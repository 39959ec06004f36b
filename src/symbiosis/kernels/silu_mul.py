"""The middle of a gated MLP, silu(gate) * up, in one launch forward and one back; only gate and up are kept.

R = rows, W = width; gate and up may lie side by side, with a change of both beside them (`kept`). Plain reference: `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.first_order import first_order
from symbiosis.kernels.launcher import Launcher
from symbiosis.kernels.lora.deferred import DeferredLora, arguments, facts, joined
from symbiosis.kernels.programmatic_launch import can_be_early, let_next_begin, wait_for_last
from symbiosis.kernels.rounding import rounded

_BLOCK = 1024


def reference(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    return F.silu(gate_RW) * up_RW


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate, up, out, width, gate_stride, up_stride, change, table, slots, own_bias, change_stride, table_stride,
    KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    kind: tl.constexpr = out.dtype.element_ty
    wait_for_last(EARLY)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if KEPT:
        of_gate, gate_stretch = facts(table, slots, row, 0, table_stride)
        of_up, up_stretch = facts(table, slots, row, 1, table_stride)
        second = width + column
        g = joined(g, change, own_bias, of_gate, gate_stretch, row, column, column, mask, change_stride, kind, HAS_BIAS)
        u = joined(u, change, own_bias, of_up, up_stretch, row, second, column, mask, change_stride, kind, HAS_BIAS)
    value = rounded(g / (1.0 + tl.exp(-g)), kind) * u
    tl.store(out + row * width + column, value.to(kind), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _back(gate, up, upstream, gate_grad, up_grad, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(upstream + row * width + column, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = gate_grad.dtype.element_ty
    share = 1.0 / (1.0 + tl.exp(-g))
    tl.store(up_grad + row * width + column, (grad * rounded(g * share, kind)).to(kind), mask=mask)
    # the slope of silu; where the share is 0 it is 0, also of -inf
    slope = tl.where(share == 0.0, 0.0, share * (1.0 + g * (1.0 - share)))
    tl.store(gate_grad + row * width + column, (rounded(grad * u, kind) * slope).to(kind), mask=mask)


_launch_gated, _launch_back = Launcher(_gated), Launcher(_back)


def _launch(gate_RW: Tensor, up_RW: Tensor, kept: DeferredLora | None = None) -> Tensor:
    (rows, width), early = gate_RW.shape, can_be_early(gate_RW.device)
    out = torch.empty(rows, width, dtype=gate_RW.dtype, device=gate_RW.device)
    if rows:
        grid, strides = (rows, triton.cdiv(width, _BLOCK), 1), (gate_RW.stride(0), up_RW.stride(0))
        rest = arguments(kept, gate_RW)
        _launch_gated(grid, out, gate_RW, up_RW, out, width, *strides, *rest, early, _BLOCK, early=early)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RW: Tensor, up_RW: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RW, up_RW)
        return _launch(gate_RW, up_RW)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream_RW: Tensor) -> tuple[Tensor, Tensor]:
        gate_RW, up_RW = ctx.saved_tensors
        (rows, width), upstream_RW = gate_RW.shape, upstream_RW.contiguous()
        gate_grad, up_grad = (torch.empty(rows, width, dtype=gate_RW.dtype, device=gate_RW.device) for _ in range(2))
        if rows:
            grid, strides = (rows, triton.cdiv(width, _BLOCK), 1), (gate_RW.stride(0), up_RW.stride(0))
            _launch_back(grid, gate_RW, gate_RW, up_RW, upstream_RW, gate_grad, up_grad, width, *strides, _BLOCK)
        return gate_grad, up_grad


def gated(gate_RW: Tensor, up_RW: Tensor, kept: DeferredLora | None = None) -> Tensor:
    """Rows may lie at any distance, the numbers of a row next to each other. What is `kept` has no gradient."""
    assert gate_RW.shape == up_RW.shape, (gate_RW.shape, up_RW.shape)
    assert gate_RW.stride(1) == up_RW.stride(1) == 1, (gate_RW.stride(), up_RW.stride())
    if torch.is_grad_enabled() and (gate_RW.requires_grad or up_RW.requires_grad):
        assert kept is None
        return _Gated.apply(gate_RW, up_RW)  # type: ignore[no-untyped-call,no-any-return]
    return _launch(gate_RW, up_RW, kept)
