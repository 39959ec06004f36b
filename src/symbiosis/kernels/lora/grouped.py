"""LoRA deltas of many adapters under training: forward, backward, and the gradients of the adapters themselves.

R = rows, I / O = input and output width, r = rank, J = adapters, T = tiles.

Each adapter has consecutive rows and an entry in the layer's table: the addresses of its weights and of their gradients.
Rows of one adapter are never multiplied with another's weights, so a NaN does not spread. Without atomics, results do
not depend on timing. Weights, gradients and the numbers between shrink and expand are float32. Products with rows in
half precision are TF32 (rows are exact in it, weights have 10 bits, sums are float32); with rows in float32 they are
exact. All that differs between passes is in device memory, so that a CUDA graph can be replayed. Plain reference:
`reference` and autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.first_order import first_order
from symbiosis.kernels.tiles import Segment, Tiles

TILE = 32
COLUMNS = 5
"""Of a table entry: a, b, rank, gradient of a, gradient of b."""
_MAX_RANK_BLOCK = 64


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """The rows of each adapter in a pass."""

    tiles: Tiles
    segments_2J: Tensor
    """First row and number of rows of each adapter."""
    ranks: int
    """The largest rank, rounded up to a power of 2, at least 16."""

    @classmethod
    def of(cls, segments: Sequence[Segment], rank: int, device: torch.device, min_rows: int = 0) -> GroupedRows:
        """One segment for each adapter, in the order of the tables. Tiles are allocated for at least `min_rows` rows."""
        assert [segment.slot for segment in segments] == list(range(len(segments)))
        on_gpu = torch.device(device).type == "cuda"
        spans = torch.tensor([[s.start for s in segments], [s.count for s in segments]], dtype=torch.int64, pin_memory=on_gpu)
        tiles = Tiles(max(min_rows, sum(s.count for s in segments)) // TILE + len(segments), TILE, device)
        tiles.fill(segments)
        return cls(tiles, spans.to(device, non_blocking=True), max(16, triton.next_power_of_2(rank)))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that differ between passes."""
        return [self.tiles.device_3T, self.segments_2J]


def reference(
    x_RI: Tensor, y_RO: Tensor, segments: Sequence[Segment], operands: Sequence[tuple[Tensor, Tensor, float]]
) -> Tensor:
    """y plus the deltas of each adapter's (a, b, scaling), under autograd."""
    parts = list(torch.split(y_RO, [segment.count for segment in segments]))
    for segment, (a_rI, b_Or, scale) in zip(segments, operands, strict=True):
        x = x_RI[segment.start : segment.start + segment.count].to(a_rI.dtype)
        y = parts[segment.slot]
        parts[segment.slot] = (y + F.linear(F.linear(x, a_rI), b_Or) * scale).to(y.dtype)
    return torch.cat(parts)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, table, scales, tiles, low, width, capacity, ranks, x_stride,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows times a (in the backward pass, times b), times the scaling."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    if (slot < 0) | (count <= 0):
        return
    entry = table + slot.to(tl.int64) * 5
    rank = tl.load(entry + 2).to(tl.int32)
    first = tl.program_id(1) * BLOCK_R
    if rank <= first:
        return
    m, r = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_R)
    here, there = m < count, r < rank
    x_rows = x + (start + m.to(tl.int64))[:, None] * x_stride
    sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    weight = tl.multiple_of(tl.load(entry + (1 if BACKWARD else 0)).to(low.dtype), 16)
    for step in range(0, width, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        inside = k < width
        row = tl.load(x_rows + k[None, :], mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if BACKWARD:
            some = tl.load(weight + k[:, None] * rank + r[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        else:
            some = tl.trans(tl.load(weight + r[:, None] * width + k[None, :], mask=there[:, None] & inside[None, :], other=0.0))
        sums = tl.dot(row, some, sums, input_precision=PRECISION)
    sums *= tl.load(scales + slot)
    tl.store(low + (start + m.to(tl.int64))[:, None] * ranks + r[None, :], sums, mask=here[:, None] & (r < ranks)[None, :])


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, table, tiles, low, width, capacity, ranks, y_stride,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`low` times b (in the backward pass, times a), added to y in place."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    if (slot < 0) | (count <= 0):
        return
    entry = table + slot.to(tl.int64) * 5
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= 0:
        return
    m, n = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here, inside = m < count, n < width
    rows = start + m.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    weight = tl.multiple_of(tl.load(entry + (0 if BACKWARD else 1)).to(low.dtype), 16)
    for first in range(0, ranks, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        there = r < rank
        some = tl.load(low + rows[:, None] * ranks + r[None, :], mask=here[:, None] & there[None, :], other=0.0)
        if BACKWARD:
            part = tl.load(weight + r[:, None] * width + n[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        else:
            part = tl.trans(tl.load(weight + n[:, None] * rank + r[None, :], mask=inside[:, None] & there[None, :], other=0.0))
        total = tl.dot(some, part, total, input_precision=PRECISION)
    mask = here[:, None] & inside[None, :]
    place = y + rows[:, None] * y_stride + n[None, :]
    total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_gradients(  # type: ignore[no-untyped-def]
    low, v, table, segments, width, adapters, ranks, v_stride,
    OF_B: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Sums of products of an adapter's rows of `low` and of `v`: the gradient of its a or b."""
    slot = tl.program_id(0)
    entry = table + slot.to(tl.int64) * 5
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= tl.program_id(2) * BLOCK_R:
        return
    start = tl.load(segments + slot)
    count = tl.load(segments + adapters + slot).to(tl.int32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside, there = c < width, r < rank
    total = tl.zeros((BLOCK_C, BLOCK_R), dtype=tl.float32)
    for step in range(0, count, BLOCK_M):
        m = step + tl.arange(0, BLOCK_M)
        here, rows = m < count, start + m.to(tl.int64)
        few = tl.load(low + rows[:, None] * ranks + r[None, :], mask=here[:, None] & there[None, :], other=0.0)
        many = tl.load(v + rows[:, None] * v_stride + c[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        total = tl.dot(tl.trans(many.to(tl.float32)), few, total, input_precision=PRECISION)
    mask = inside[:, None] & there[None, :]
    if OF_B:
        target = tl.multiple_of(tl.load(entry + 4).to(low.dtype), 16)
        tl.store(target + c.to(tl.int64)[:, None] * rank + r[None, :], total, mask=mask)
    else:
        target = tl.multiple_of(tl.load(entry + 3).to(low.dtype), 16)
        tl.store(target + r.to(tl.int64)[None, :] * width + c[:, None], total, mask=mask)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


def shrink(x: Tensor, table: Tensor, scales_J: Tensor, rows: GroupedRows, *, backward: bool) -> Tensor:
    """[R, r] in float32; undefined in rows without an adapter."""
    low_Rr = torch.empty(x.shape[0], rows.ranks, dtype=torch.float32, device=x.device)
    block = min(rows.ranks, _MAX_RANK_BLOCK)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _shrink[(rows.tiles.capacity, rows.ranks // block)](
            x, table, scales_J, rows.tiles.device_3T, low_Rr, x.shape[1], rows.tiles.capacity, rows.ranks, x.stride(0),
            BACKWARD=backward, PRECISION=_precision(x), BLOCK_M=TILE, BLOCK_K=128, BLOCK_R=block, num_warps=4, num_stages=3,
        )  # fmt: skip
    return low_Rr


def expand(y: Tensor, low_Rr: Tensor, table: Tensor, rows: GroupedRows, *, backward: bool) -> None:
    width = y.shape[1]
    with torch.cuda.device_of(y):  # type: ignore[no-untyped-call]
        _expand[(rows.tiles.capacity, triton.cdiv(width, 256))](
            y, table, rows.tiles.device_3T, low_Rr, width, rows.tiles.capacity, rows.ranks, y.stride(0),
            BACKWARD=backward, PRECISION=_precision(y), BLOCK_M=TILE, BLOCK_N=256, BLOCK_R=16, num_warps=8, num_stages=1,
        )  # fmt: skip


def write_gradients(low_Rr: Tensor, v: Tensor, table: Tensor, rows: GroupedRows, *, of_b: bool) -> None:
    """Write the gradients of a or b to the addresses in the table."""
    width, adapters = v.shape[1], rows.segments_2J.shape[1]
    block = min(rows.ranks, _MAX_RANK_BLOCK)
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        _weight_gradients[(adapters, triton.cdiv(width, 64), rows.ranks // block)](
            low_Rr, v, table, rows.segments_2J, width, adapters, rows.ranks, v.stride(0),
            OF_B=of_b, PRECISION=_precision(v), BLOCK_M=64, BLOCK_C=64, BLOCK_R=block, num_warps=4, num_stages=3,
        )  # fmt: skip


class _GroupedLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        anchor: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        table: Tensor,
        scales_J: Tensor,
        rows: GroupedRows,
    ) -> Tensor:
        y_RO = F.linear(x_RI, weight_OI, bias_O)
        low_Rr = shrink(x_RI, table, scales_J, rows, backward=False)
        expand(y_RO, low_Rr, table, rows, backward=False)
        ctx.save_for_backward(x_RI, low_Rr, weight_OI, table, scales_J)
        ctx.rows = rows
        return y_RO

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream_RO: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None]:
        x_RI, low_Rr, weight_OI, table, scales_J = ctx.saved_tensors
        upstream_RO = upstream_RO.contiguous()
        write_gradients(low_Rr, upstream_RO, table, ctx.rows, of_b=True)
        grad_Rr = shrink(upstream_RO, table, scales_J, ctx.rows, backward=True)
        write_gradients(grad_Rr, x_RI, table, ctx.rows, of_b=False)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = upstream_RO @ weight_OI
            expand(grad_x, grad_Rr, table, ctx.rows, backward=True)
        return grad_x, None, None, None, None, None, None


def grouped_lora(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, table: Tensor, scales_J: Tensor, rows: GroupedRows, anchor: Tensor
) -> Tensor:
    """Output of a frozen linear layer with the deltas of all adapters, [R, O].

    `table`, int64 [J, 5], has an entry for each adapter, with rank 0 for one without weights for this layer. The backward
    pass writes the adapters' gradients to the addresses in the table. `anchor` requires a gradient, so that it runs, and
    gets none.
    """
    y: Tensor = _GroupedLora.apply(x_RI.contiguous(), anchor, weight_OI, bias_O, table, scales_J, rows)  # type: ignore[no-untyped-call]
    return y
