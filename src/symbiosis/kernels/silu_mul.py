"""silu(gate) × up, the middle of a gated MLP, in one launch forward and one backward; only gate and up are saved.

R = rows, W = width. gate and up may be halves of one tensor, with a LoRA delta of both (`deferred`). Plain reference:
`reference`.
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
from symbiosis.kernels.lora.deferred import DeferredLora, add_delta, delta_arguments, find_delta
from symbiosis.kernels.programmatic_launch import launch_dependents, supports_pdl, wait_for_previous
from symbiosis.kernels.rounding import rounded

_BLOCK = 1024


def reference(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    return F.silu(gate_RW) * up_RW


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def]
    gate, up, out, width, gate_stride, up_stride, delta, table, slots, base_bias, delta_stride, table_stride,
    DEFERRED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    kind: tl.constexpr = out.dtype.element_ty
    wait_for_previous(PDL)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if DEFERRED:
        gate_has, gate_scale = find_delta(table, slots, row, 0, table_stride)
        up_has, up_scale = find_delta(table, slots, row, 1, table_stride)
        second = width + column
        g = add_delta(g, delta, base_bias, gate_has, gate_scale, row, column, column, mask, delta_stride, kind, HAS_BIAS)
        u = add_delta(u, delta, base_bias, up_has, up_scale, row, second, column, mask, delta_stride, kind, HAS_BIAS)
    value = rounded(g / (1.0 + tl.exp(-g)), kind) * u
    tl.store(out + row * width + column, value.to(kind), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_backward(gate, up, upstream, gate_grad, up_grad, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(upstream + row * width + column, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = gate_grad.dtype.element_ty
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    tl.store(up_grad + row * width + column, (grad * rounded(g * sigmoid, kind)).to(kind), mask=mask)
    # the derivative of silu; 0 where the sigmoid is 0, also for -inf
    slope = tl.where(sigmoid == 0.0, 0.0, sigmoid * (1.0 + g * (1.0 - sigmoid)))
    tl.store(gate_grad + row * width + column, (rounded(grad * u, kind) * slope).to(kind), mask=mask)


_launch_forward, _launch_backward = Launcher(_silu_mul), Launcher(_silu_mul_backward)


def _launch(gate_RW: Tensor, up_RW: Tensor, deferred: DeferredLora | None = None) -> Tensor:
    (rows, width), pdl = gate_RW.shape, supports_pdl(gate_RW.device)
    out = torch.empty(rows, width, dtype=gate_RW.dtype, device=gate_RW.device)
    if rows:
        grid, strides = (rows, triton.cdiv(width, _BLOCK), 1), (gate_RW.stride(0), up_RW.stride(0))
        rest = delta_arguments(deferred, gate_RW)
        _launch_forward(grid, out, gate_RW, up_RW, out, width, *strides, *rest, pdl, _BLOCK, pdl=pdl)
    return out


class _SiluMul(torch.autograd.Function):
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
            _launch_backward(grid, gate_RW, gate_RW, up_RW, upstream_RW, gate_grad, up_grad, width, *strides, _BLOCK)
        return gate_grad, up_grad


def silu_mul(gate_RW: Tensor, up_RW: Tensor, deferred: DeferredLora | None = None) -> Tensor:
    """Rows may have any stride, the numbers of a row are contiguous. `deferred` has no gradient."""
    assert gate_RW.shape == up_RW.shape, (gate_RW.shape, up_RW.shape)
    assert gate_RW.stride(1) == up_RW.stride(1) == 1, (gate_RW.stride(), up_RW.stride())
    if torch.is_grad_enabled() and (gate_RW.requires_grad or up_RW.requires_grad):
        assert deferred is None
        return _SiluMul.apply(gate_RW, up_RW)  # type: ignore[no-untyped-call,no-any-return]
    return _launch(gate_RW, up_RW, deferred)
