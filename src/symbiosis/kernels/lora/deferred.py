"""A LoRA delta that was computed on another stream and is added by the kernel that reads the layer's output.

R = rows, O* = outputs of all layers of a product, next to each other. `add_deferred` only adds it. A kernel that reads
the output anyway adds the delta itself with `find_delta` and `add_delta`, which saves that launch. Both compute what
`shrink_expand.expand` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.lora.fused_widths import FusedWidths
from symbiosis.kernels.programmatic_launch import launch_dependents, pdl_options
from symbiosis.kernels.rounding import rounded

_BLOCK = 1024  # columns of a program of `_add_deferred`


@dataclass(frozen=True, slots=True)
class DeferredLora:
    """Valid until the next delta of layers of this kind is computed."""

    delta_RO: Tensor
    """In float32. Undefined in rows and layers without an adapter."""
    table: Tensor
    """Entries of these layers by slot, as in `shrink_expand.add_lora`."""
    slots_R: Tensor
    """The slot of each row, or -1."""
    base_bias_O: Tensor | None = None
    """The layers' own bias, which their output includes already; only DoRA reads it."""


def delta_arguments(deferred: DeferredLora | None, like: Tensor) -> tuple[Any, ...]:
    """Arguments of every kernel that adds a delta, in this order:

    delta, table, slots, base_bias, delta_stride, table_stride, DEFERRED, HAS_BIAS
    """
    if deferred is None:
        return like, like, like, like, 0, 0, False, False
    bias_O = like if deferred.base_bias_O is None else deferred.base_bias_O
    assert deferred.delta_RO.stride(1) == 1, deferred.delta_RO.stride()
    strides = deferred.delta_RO.stride(0), deferred.table.stride(0)
    return deferred.delta_RO, deferred.table, deferred.slots_R, bias_O, *strides, True, deferred.base_bias_O is not None


@triton.jit  # type: ignore[untyped-decorator]
def apply_mag_norm_scale(value, scale_at, base_bias, column, own, mask, HAS_BIAS: tl.constexpr, SEVERAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """DoRA: scale `value` without the layer's own bias. `scale_at` is the scale's address or 0. One row or [rows, columns]."""
    if scale_at != 0:
        scale = tl.load(tl.multiple_of(scale_at.to(base_bias.dtype), 16) + own, mask=mask, other=1.0).to(tl.float32)
        if SEVERAL:
            scale = scale[None, :]
        if HAS_BIAS:
            bias = tl.load(base_bias + column, mask=mask, other=0.0).to(tl.float32)
            if SEVERAL:
                bias = bias[None, :]
            value = (value - bias) * scale + bias
        else:
            value = value * scale
    return value


@triton.jit
def find_delta(table, slots, row, member, table_stride):  # type: ignore[no-untyped-def]
    """Whether this row has a delta in this layer, and the address of DoRA's scale. No kernel writes these meanwhile."""
    slot = tl.load(slots + row)
    entry = table + tl.maximum(slot, 0).to(tl.int64) * table_stride + member * 4
    has = (slot >= 0) & (tl.load(entry + 2) > 0)
    return has, tl.where(has, tl.load(entry + 3), 0)


@triton.jit  # type: ignore[untyped-decorator]
def add_delta(  # type: ignore[no-untyped-def]
    value, delta, base_bias, has, scale_at, row, column, own, mask, delta_stride, KIND: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """`value`, part of an output row, with its delta, rounded as if it had been stored. `own`: columns within its layer."""
    found = tl.load(delta + row * delta_stride + column, mask=mask, other=0.0)
    found = apply_mag_norm_scale(value + found, scale_at, base_bias, column, own, mask, HAS_BIAS, False)
    return tl.where(has, rounded(found, KIND), value)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _add_deferred(  # type: ignore[no-untyped-def]
    y, blocks, y_stride, delta, table, slots, base_bias, delta_stride, table_stride,
    DEFERRED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Not launched with PDL: all kernels before it, on both streams, have ended."""
    row, block = tl.program_id(0).to(tl.int64), blocks + tl.program_id(1) * 4
    launch_dependents(PDL)
    member = tl.load(block)
    column, own, columns = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if ALIGNED:
        column, own, columns = tl.multiple_of(column, 16), tl.multiple_of(own, 16), tl.multiple_of(columns, 16)
    has, scale_at = find_delta(table, slots, row, member, table_stride)
    if not has:
        return
    n = tl.arange(0, BLOCK_N)
    y_at, mask = y + row * y_stride + column + n, n < columns
    kind: tl.constexpr = y.dtype.element_ty
    value = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    value = add_delta(value, delta, base_bias, has, scale_at, row, column + n, own + n, mask, delta_stride, kind, HAS_BIAS)
    tl.store(y_at, value.to(kind), mask=mask)


def add_deferred(y_RO: Tensor, deferred: DeferredLora, members: FusedWidths) -> None:
    """Add the delta to y in place, where no kernel that reads y does so. They may come from different streams."""
    assert (y_RO.shape[1], y_RO.stride(1)) == (sum(members.widths), 1), (y_RO.shape, members.widths)
    blocks = members.blocks(_BLOCK)
    with torch.cuda.device_of(y_RO):  # type: ignore[no-untyped-call]
        _add_deferred[(y_RO.shape[0], blocks.shape[0])](
            y_RO, blocks, y_RO.stride(0), *delta_arguments(deferred, y_RO), ALIGNED=members.is_aligned, BLOCK_N=_BLOCK,
            **pdl_options(y_RO.device, waits=True),
        )  # fmt: skip
