"""A low-rank change that was computed beside a product and lies beside its result, until a kernel reads both.

R = rows, O* = outputs of all layers of a product, side by side. `join` only adds
it. A kernel that reads the result anyway adds it by itself, and saves that
launch: `facts` and `joined` are for such kernels. Both give what `low_rank.expand` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.programmatic_launch import early, let_next_begin
from symbiosis.kernels.rounding import rounded

if TYPE_CHECKING:
    from symbiosis.kernels.lora.shrink_expand import FusedWidths

_AT_ONCE = 1024  # columns of a program that joins


@dataclass(frozen=True, slots=True)
class DeferredLora:
    """Good until the next change of layers of this kind is computed."""

    change_RO: Tensor
    """In float32. Of rows and layers that no adapter changes there is anything."""
    table: Tensor
    """Of these layers' changes by adapter, as `low_rank` reads it."""
    slots_R: Tensor
    """Whose each row is: a line of the table, or -1."""
    bias_O: Tensor | None = None
    """The layers' own, which is in their result already; only DoRA asks for it."""


def arguments(kept: DeferredLora | None, like: Tensor) -> tuple[Any, ...]:
    """What every kernel that adds it takes, one after the other.

    change, table, slots, own_bias, change_stride, table_stride, KEPT, HAS_BIAS
    """
    if kept is None:
        return like, like, like, like, 0, 0, False, False
    bias_O = like if kept.bias_O is None else kept.bias_O
    assert kept.change_RO.stride(1) == 1, kept.change_RO.stride()
    strides = kept.change_RO.stride(0), kept.table.stride(0)
    return kept.change_RO, kept.table, kept.slots_R, bias_O, *strides, True, kept.bias_O is not None


@triton.jit  # type: ignore[untyped-decorator]
def stretched(value, stretch, own_bias, column, own, mask, HAS_BIAS: tl.constexpr, SEVERAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """DoRA: `value` without the layer's own bias, times the stretch. One row or [rows, columns]."""
    if stretch != 0:
        scale = tl.load(tl.multiple_of(stretch.to(own_bias.dtype), 16) + own, mask=mask, other=1.0).to(tl.float32)
        if SEVERAL:
            scale = scale[None, :]
        if HAS_BIAS:
            bias = tl.load(own_bias + column, mask=mask, other=0.0).to(tl.float32)
            if SEVERAL:
                bias = bias[None, :]
            value = (value - bias) * scale + bias
        else:
            value = value * scale
    return value


@triton.jit
def facts(table, slots, row, member, table_stride):  # type: ignore[no-untyped-def]
    """Whether an adapter changes this row of this layer, and DoRA's stretch. Nobody writes these meanwhile."""
    slot = tl.load(slots + row)
    entry = table + tl.maximum(slot, 0).to(tl.int64) * table_stride + member * 4
    has = (slot >= 0) & (tl.load(entry + 2) > 0)
    return has, tl.where(has, tl.load(entry + 3), 0)


@triton.jit  # type: ignore[untyped-decorator]
def joined(  # type: ignore[no-untyped-def]
    value, change, own_bias, has, stretch, row, column, own, mask, change_stride, KIND: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """`value`, part of a row of a result, with its change, rounded as if it had been stored. `own`: its layer's columns."""
    found = tl.load(change + row * change_stride + column, mask=mask, other=0.0)
    found = stretched(value + found, stretch, own_bias, column, own, mask, HAS_BIAS, False)
    return tl.where(has, rounded(found, KIND), value)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    y, blocks, y_stride, change, table, slots, own_bias, change_stride, table_stride,
    KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Never launched early: all before it, on both streams, has ended."""
    row, block = tl.program_id(0).to(tl.int64), blocks + tl.program_id(1) * 4
    let_next_begin(EARLY)
    member = tl.load(block)
    column, own, columns = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if EVEN:
        column, own, columns = tl.multiple_of(column, 16), tl.multiple_of(own, 16), tl.multiple_of(columns, 16)
    has, stretch = facts(table, slots, row, member, table_stride)
    if not has:
        return
    n = tl.arange(0, BLOCK_N)
    y_at, mask = y + row * y_stride + column + n, n < columns
    kind: tl.constexpr = y.dtype.element_ty
    value = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    value = joined(value, change, own_bias, has, stretch, row, column + n, own + n, mask, change_stride, kind, HAS_BIAS)
    tl.store(y_at, value.to(kind), mask=mask)


def join(y_RO: Tensor, kept: DeferredLora, members: FusedWidths) -> None:
    """Add it to y, in place, where no kernel that reads y does so. y and the change may come from different streams."""
    assert (y_RO.shape[1], y_RO.stride(1)) == (sum(members.widths), 1), (y_RO.shape, members.widths)
    blocks = members.blocks(_AT_ONCE)
    with torch.cuda.device_of(y_RO):  # type: ignore[no-untyped-call]
        _join[(y_RO.shape[0], blocks.shape[0])](
            y_RO, blocks, y_RO.stride(0), *arguments(kept, y_RO), EVEN=members.even, BLOCK_N=_AT_ONCE,
            **early(y_RO.device, waits=True),
        )  # fmt: skip
