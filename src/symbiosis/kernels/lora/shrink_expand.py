"""LoRA deltas of many adapters in one batch: two launches for all adapters and all layers that read the same rows.

R = rows, I / O = input and output width, r = rank, M = members (layers that read the same rows: q, k and v), O* = their
outputs next to each other, T = tiles, S = splits of the input width.

Consecutive rows of one adapter are cut into tiles. `_shrink` multiplies the rows of a tile with its adapter's `a`, each
program over a part of I. `_expand` sums the parts, multiplies with `b` and adds to the layer's own output in place.
Weights are read in place, once per tile, over the adapter's own rank. Without atomics, results do not depend on timing.
All that differs between batches is in device memory, so a CUDA graph can be replayed for other rows and adapters, and
changed numbers need no compilation. Tiles of few rows (decoding with different adapters) are multiplied row by row
without tensor cores, for ranks up to 64: they are bound by reading the weights, which begins before the previous kernel
has ended. The numbers between the two kernels are rounded to the model's dtype, as in PEFT. Plain reference: `reference`.

Neither kernel needs the layer's own output. So `shrink` can run on another stream than the layer's product, and
`expand_deferred` too where there is much to read: it stores the delta for the kernel that reads the output (`deferred`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.lora.deferred import DeferredLora, apply_mag_norm_scale
from symbiosis.kernels.lora.fused_widths import FusedWidths
from symbiosis.kernels.programmatic_launch import launch_dependents, pdl_options, wait_for_previous
from symbiosis.kernels.tiles import Segment, Tiles

_MULTIPROCESSORS = 132  # of an H200
_ALIGNMENT = 16  # bytes
_MAX_SPLITS = 32
_MAX_DECODE_ROWS = 64  # batches of more rows contain prefill
_FEW_ROWS = 2  # of a tile, multiplied one by one without tensor cores
_MAX_RANK_BLOCK = 64
_MIN_SPLIT = 1024  # input columns: every program of `_expand` reads all parts again
_MAX_PROGRAMS = 1024  # instead of more, each computes several blocks


@dataclass(frozen=True, slots=True)
class LoraOperand:
    """LoRA weights of one adapter for one layer; `b_Or` includes the scaling."""

    a_rI: Tensor
    b_Or: Tensor
    mag_norm_scale_O: Tensor | None = None
    """DoRA: factor of the whole output without the layer's own bias."""

    def entry(self) -> tuple[int, int, int, int]:
        """Its table entry: addresses and rank. The owner of the table must keep the tensors alive."""
        tensors = (self.a_rI, self.b_Or) if self.mag_norm_scale_O is None else (self.a_rI, self.b_Or, self.mag_norm_scale_O)
        rank = self.a_rI.shape[0]
        if self.b_Or.shape[1] != rank or len({t.dtype for t in tensors}) != 1:
            raise ValueError(
                f"ranks or dtypes differ: a {tuple(self.a_rI.shape)}, b {tuple(self.b_Or.shape)}, {[t.dtype for t in tensors]}"
            )
        if not all(t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 for t in tensors):
            raise ValueError(f"weights must be contiguous and start at multiples of {_ALIGNMENT} bytes")
        scale_at = 0 if self.mag_norm_scale_O is None else self.mag_norm_scale_O.data_ptr()
        return self.a_rI.data_ptr(), self.b_Or.data_ptr(), rank, scale_at


EMPTY_ENTRY = (0, 0, 0, 0)
"""The table entry of an adapter without weights for this layer."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How the kernels are launched; `plan_launch` selects one by size."""

    splits: int
    """Parts of the input width, one program each."""
    rank_programs: int
    """Programs that divide the rank of an adapter."""
    block_k: int
    """Input columns of two bytes that a program reads at once; all that it reads for tiles of few rows."""
    block_n: int
    """Output columns a program computes at once."""
    blocks: int = 1
    """Blocks that a program computes in sequence, prefetching the next; for tiles of few rows."""
    shrink_warps: int = 4
    expand_warps: int = 4


def tile_rows(rows: int, segments: int, max_rank: int) -> int:
    """Rows of a tile in a batch of `rows` rows and `segments` adapters."""
    if rows <= _MAX_DECODE_ROWS and rows < 16 * segments:  # mostly one row per adapter
        return _FEW_ROWS
    if 16 < rows <= _MAX_DECODE_ROWS and segments == 1 and max_rank > 32:  # much to read, once for all rows
        return 32 if rows <= 32 else 64
    return 16 if rows <= 256 else 64


def max_tiles(rows: int, tile: int) -> int:
    """Most tiles of any batch of up to `rows` rows for which `tile_rows` returns `tile`."""
    return 2 * -(-rows // tile) if rows <= _MAX_DECODE_ROWS and tile > _FEW_ROWS else rows


def plan_launch(tiles: Tiles, width: int, widths: Sequence[int], max_rank: int) -> LaunchPlan:
    programs = tiles.typical * len(widths)
    ranks = -(-max_rank // 16)
    if tiles.rows <= _FEW_ROWS:
        block_k = 256
        while -(-width // block_k) > _MAX_SPLITS:
            block_k *= 2
        splits = -(-width // block_k)
        if max_rank > 16:
            return LaunchPlan(splits, ranks, block_k, block_n=128)
        blocks = max(1, min(4, tiles.typical * sum(widths) // (64 * _MAX_PROGRAMS)))
        return LaunchPlan(splits, ranks, block_k, block_n=64, blocks=blocks, expand_warps=1)
    many = tiles.rows > 16
    wanted = _MULTIPROCESSORS // (programs * ranks) if many else -(-_MULTIPROCESSORS * 4 // programs)
    splits = max(1, min(-(-width // _MIN_SPLIT), wanted, _MAX_SPLITS))
    block_k = 128 if many and programs * ranks * splits > _MULTIPROCESSORS else 256
    busy = tiles.typical * sum(widths) >= 128 * _MULTIPROCESSORS  # with blocks of 256
    block_n, warps = (256, 4) if max_rank <= 16 or (many and busy) else (128, 8)
    return LaunchPlan(splits, ranks, block_k, block_n, expand_warps=warps)


def reference(
    x_RI: Tensor,
    y_RO: Tensor,
    segments: Sequence[Segment],
    operands: Sequence[Sequence[LoraOperand | None]],
    widths: Sequence[int],
    base_bias_O: Tensor | None = None,
) -> None:
    """Add the deltas to y in place; `operands` by slot and member."""
    for segment in segments:
        if segment.slot < 0:
            continue
        rows, column = slice(segment.start, segment.start + segment.count), 0
        for operand, width in zip(operands[segment.slot], widths, strict=True):
            columns = slice(column, column + width)
            column += width
            if operand is None:
                continue
            low = (x_RI[rows].float() @ operand.a_rI.float().T).to(x_RI.dtype)
            y = y_RO[rows, columns].float() + low.float() @ operand.b_Or.float().T
            if operand.mag_norm_scale_O is not None:
                bias = 0.0 if base_bias_O is None else base_bias_O[columns].float()
                y = (y - bias) * operand.mag_norm_scale_O.float() + bias
            y_RO[rows, columns] = y.to(y_RO.dtype)


@triton.jit(do_not_specialize=["rows", "members", "capacity", "rank_programs", "table_stride"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, table, tiles, parts, rows, width, span, members, capacity, rank_programs, max_rank, x_stride, table_stride,
    PDL: tl.constexpr, FEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, member = tl.program_id(0), tl.program_id(2)
    split, rank_program = tl.program_id(1) // rank_programs, tl.program_id(1) % rank_programs
    launch_dependents(PDL)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    if (slot < 0) | (count <= 0):
        wait_for_previous(PDL)
        return
    entry = table + slot.to(tl.int64) * table_stride + member * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= rank_program * 16:
        wait_for_previous(PDL)
        return
    a = tl.multiple_of(tl.load(entry).to(x.dtype), 16)
    begin = split * span
    end = tl.minimum(begin + span, width)
    x += start * x_stride
    parts += ((split * members + member).to(tl.int64) * rows + start) * max_rank
    for first in range(rank_program * 16, rank, 16 * rank_programs):
        r = first + tl.arange(0, 16)
        a_rows = a + r.to(tl.int64)[:, None] * width
        if FEW:  # the span is one block
            k = begin + tl.arange(0, BLOCK_K)
            weight = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < end)[None, :], other=0.0)
            wait_for_previous(PDL)
            for m in range(count):
                row = tl.load(x + m * x_stride + k, mask=k < end, other=0.0)
                low = tl.sum(weight.to(tl.float32) * row.to(tl.float32)[None, :], 1)
                tl.store(parts + m * max_rank + r, low, mask=r < rank)
        else:
            wait_for_previous(PDL)
            m = tl.arange(0, BLOCK_M)
            x_rows = x + m.to(tl.int64)[:, None] * x_stride
            sums = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
            for step in range(begin, end, BLOCK_K):
                k = step + tl.arange(0, BLOCK_K)
                weight = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < end)[None, :], other=0.0)
                row = tl.load(x_rows + k[None, :], mask=(m < count)[:, None] & (k < end)[None, :], other=0.0)
                sums = tl.dot(row, tl.trans(weight), sums, input_precision="ieee")
            tl.store(parts + m[:, None] * max_rank + r[None, :], sums, mask=(m < count)[:, None] & (r < rank)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    y_at, delta, mask, scale_at, base_bias, column, own, inside,
    FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Store a delta (`FRESH`), or add it to the output. One row or [rows, columns]; `inside` masks the columns."""
    if not FRESH:
        delta += tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        delta = apply_mag_norm_scale(delta, scale_at, base_bias, column, own, inside, HAS_BIAS, SEVERAL)
    tl.store(y_at, delta.to(y_at.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _expand_few(  # type: ignore[no-untyped-def]
    y, b, parts, base_bias, scale_at, column, own, columns, rank, splits, split_stride, max_rank, count, y_stride,
    PDL: tl.constexpr, FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One or two rows, block by block. The weights are read in memory order."""
    s, n, r = tl.arange(0, SPLITS), tl.arange(0, BLOCK_N), tl.arange(0, WIDE)
    weight_at = b + n.to(tl.int64)[:, None] * rank + r[None, :]
    weight = tl.load(weight_at, mask=(n < columns)[:, None] & (r < rank)[None, :], other=0.0)
    wait_for_previous(PDL)
    low_at = parts + s.to(tl.int64)[:, None] * split_stride + r[None, :]
    there = (s < splits)[:, None] & (r < rank)[None, :]
    low = tl.sum(tl.load(low_at, mask=there, other=0.0), 0).to(weight.dtype).to(tl.float32)
    other = tl.sum(tl.load(low_at + max_rank, mask=there & (count > 1), other=0.0), 0).to(weight.dtype).to(tl.float32)
    for _ in range(0, columns, BLOCK_N):
        inside = n < columns
        now = weight.to(tl.float32)
        if AHEAD:
            weight_at += BLOCK_N * rank
            weight = tl.load(weight_at, mask=(n + BLOCK_N < columns)[:, None] & (r < rank)[None, :], other=0.0)
        y_at, delta = y + column + n, tl.sum(now * low[None, :], 1)
        _write(y_at, delta, inside, scale_at, base_bias, column + n, own + n, inside, FRESH, HAS_BIAS, False)
        if count > 1:
            delta = tl.sum(now * other[None, :], 1)
            _write(y_at + y_stride, delta, inside, scale_at, base_bias, column + n, own + n, inside, FRESH, HAS_BIAS, False)
        n += BLOCK_N


@triton.jit  # type: ignore[untyped-decorator]
def _expand_many(  # type: ignore[no-untyped-def]
    y, b, parts, base_bias, scale_at, column, own, columns, rank, splits, split_stride, max_rank, count, y_stride,
    PDL: tl.constexpr, FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All rows at once, `WIDE` ranks and `SPLITS` parts at a time."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows = m < count
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, rank, WIDE):
        r = first + tl.arange(0, WIDE)
        weight_at = b + n.to(tl.int64)[:, None] * rank + r[None, :]
        weight = tl.load(weight_at, mask=(n < columns)[:, None] & (r < rank)[None, :], other=0.0)
        wait_for_previous(PDL)
        low = tl.zeros((BLOCK_M, WIDE), dtype=tl.float32)
        for some in range(0, splits, SPLITS):
            s = some + tl.arange(0, SPLITS)
            low_at = parts + s.to(tl.int64)[:, None, None] * split_stride + m[None, :, None] * max_rank + r[None, None, :]
            there = (s < splits)[:, None, None] & rows[None, :, None] & (r < rank)[None, None, :]
            low += tl.sum(tl.load(low_at, mask=there, other=0.0), 0)
        total = tl.dot(low.to(weight.dtype), tl.trans(weight), total, input_precision="ieee")
    mask = rows[:, None] & (n < columns)[None, :]
    y_at = y + m.to(tl.int64)[:, None] * y_stride + (column + n)[None, :]
    _write(y_at, total, mask, scale_at, base_bias, column + n, own + n, n < columns, FRESH, HAS_BIAS, True)


@triton.jit(do_not_specialize=["rows", "capacity", "splits", "table_stride"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, table, tiles, blocks, parts, base_bias, rows, capacity, splits, split_stride, max_rank, y_stride, table_stride,
    PDL: tl.constexpr, FRESH: tl.constexpr, FEW: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), blocks + tl.program_id(1) * 4
    launch_dependents(PDL)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    member = tl.load(block)
    column, own, columns = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if (slot < 0) | (count <= 0):
        wait_for_previous(PDL)
        return
    entry = table + slot.to(tl.int64) * table_stride + member * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= 0:
        wait_for_previous(PDL)
        return
    if ALIGNED:
        column, own, columns = tl.multiple_of(column, 16), tl.multiple_of(own, 16), tl.multiple_of(columns, 16)
    scale_at = tl.load(entry + 3)
    y += start * y_stride
    b = tl.multiple_of(tl.load(entry + 1).to(base_bias.dtype), 16) + tl.multiple_of(own.to(tl.int64) * rank, 8)
    parts += (member.to(tl.int64) * rows + start) * max_rank
    # Rows of b that start at multiples of 16 bytes are read 16 bytes at a time: `even` lets the compiler infer that.
    even = (rank // 8) * 8
    if FEW:
        if even == rank:
            _expand_few(
                y, b, parts, base_bias, scale_at, column, own, columns, even, splits, split_stride, max_rank, count, y_stride,
                PDL, FRESH, HAS_BIAS, SPLITS, BLOCK_N, AHEAD, WIDE,
            )  # fmt: skip
        else:
            _expand_few(
                y, b, parts, base_bias, scale_at, column, own, columns, rank, splits, split_stride, max_rank, count, y_stride,
                PDL, FRESH, HAS_BIAS, SPLITS, BLOCK_N, AHEAD, WIDE,
            )  # fmt: skip
    elif even == rank:
        _expand_many(
            y, b, parts, base_bias, scale_at, column, own, columns, even, splits, split_stride, max_rank, count, y_stride,
            PDL, FRESH, HAS_BIAS, PARTS, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
    else:
        _expand_many(
            y, b, parts, base_bias, scale_at, column, own, columns, rank, splits, split_stride, max_rank, count, y_stride,
            PDL, FRESH, HAS_BIAS, PARTS, BLOCK_M, BLOCK_N, 16,
        )  # fmt: skip


class LoraBatch:
    """Launch plan and buffers of layers of one kind in a batch.

    A layer may use them once the delta of the previous one is added.
    """

    def __init__(
        self, tiles: Tiles, rows: int, width: int, members: FusedWidths, max_rank: int, chosen: LaunchPlan | None = None
    ) -> None:
        self.tiles, self.members = tiles, members
        self.few = tiles.rows <= _FEW_ROWS
        """Bound by reading weights: `expand_deferred` on another stream pays off."""
        self.plan = chosen or plan_launch(tiles, width, members.widths, max_rank)
        shape = (self.plan.splits, len(members), rows, max_rank)
        self.parts_SMRr = torch.empty(shape, dtype=torch.float32, device=members.device)

        self.delta_RO = torch.empty(0, 0, dtype=torch.float32, device=members.device)
        """Result of `expand_deferred`; empty until `allocate_delta`."""

    def allocate_delta(self) -> None:
        """Allocate `delta_RO`. The current stream must be the one that reads it."""
        if not self.delta_RO.numel():
            self.delta_RO = self.delta_RO.new_empty(self.parts_SMRr.shape[2], sum(self.members.widths))


def shrink(x_RI: Tensor, table: Tensor, work: LoraBatch, *, on_other_stream: bool = False) -> None:
    """Rows times `a`, in parts over the input width. `on_other_stream`: another stream computed the rows."""
    splits, members, rows, max_rank = work.parts_SMRr.shape
    tiles, chosen = work.tiles, work.plan
    assert max_rank % 16 == 0, max_rank
    assert members == table.shape[1], (work.members.widths, table.shape)
    assert rows >= x_RI.shape[0], (rows, x_RI.shape)
    assert (x_RI.stride(1), table.stride(1), table.stride(2)) == (1, 4, 1)
    block_k = chosen.block_k if work.few else 2 * chosen.block_k // x_RI.element_size()
    span = block_k if work.few else -(-x_RI.shape[1] // (splits * block_k)) * block_k
    assert splits * span >= x_RI.shape[1], (chosen, x_RI.shape)
    with torch.cuda.device_of(x_RI):  # type: ignore[no-untyped-call]
        _shrink[(tiles.capacity, splits * chosen.rank_programs, members)](
            x_RI, table, tiles.device_3T, work.parts_SMRr, rows, x_RI.shape[1], span, members, tiles.capacity,
            chosen.rank_programs, max_rank, x_RI.stride(0), table.stride(0),
            FEW=work.few, BLOCK_M=max(16, tiles.rows), BLOCK_K=block_k,
            num_warps=chosen.shrink_warps, num_stages=3, **pdl_options(x_RI.device, waits=on_other_stream),
        )  # fmt: skip


def expand(y_RO: Tensor, table: Tensor, work: LoraBatch, base_bias_O: Tensor | None = None) -> None:
    """The sum of the parts times `b`, added to y, [R, O*], in place. y includes `base_bias_O` already; only DoRA reads it.

    y and the parts may come from different streams.
    """
    bias_O = y_RO if base_bias_O is None else base_bias_O
    _launch_expand(y_RO, bias_O, table, work, has_bias=base_bias_O is not None, fresh=False)


def expand_deferred(table: Tensor, work: LoraBatch, like: Tensor, base_bias_O: Tensor | None = None) -> DeferredLora:
    """The sum of the parts times `b`, stored in `work`. `like` has the dtype of the weights."""
    _launch_expand(work.delta_RO, like, table, work, has_bias=False, fresh=True)
    return DeferredLora(work.delta_RO, table, work.tiles.slots_R, base_bias_O)


def _launch_expand(y_RO: Tensor, base_bias_O: Tensor, table: Tensor, work: LoraBatch, *, has_bias: bool, fresh: bool) -> None:
    """Without a bias, `base_bias_O` only has the dtype of the weights: y has another if `fresh`."""
    splits, _, rows, max_rank = work.parts_SMRr.shape
    tiles, members, chosen = work.tiles, work.members, work.plan
    assert (y_RO.shape[1], y_RO.stride(1)) == (sum(members.widths), 1), (y_RO.shape, members.widths)
    few = work.few and max_rank <= _MAX_RANK_BLOCK
    blocks = members.blocks(chosen.block_n * chosen.blocks if few else chosen.block_n)
    block_m, every = max(16, tiles.rows), triton.next_power_of_2(splits)
    wide = min(_MAX_RANK_BLOCK, triton.next_power_of_2(max_rank))
    with torch.cuda.device_of(y_RO):  # type: ignore[no-untyped-call]
        _expand[(tiles.capacity, blocks.shape[0])](
            y_RO, table, tiles.device_3T, blocks, work.parts_SMRr, base_bias_O,
            rows, tiles.capacity, splits, work.parts_SMRr.stride(0), max_rank, y_RO.stride(0), table.stride(0),
            FRESH=fresh, FEW=few, HAS_BIAS=has_bias, ALIGNED=members.is_aligned, SPLITS=every,
            PARTS=max(1, min(8, every, 8192 // (block_m * wide))), BLOCK_M=block_m, BLOCK_N=chosen.block_n,
            AHEAD=chosen.blocks > 1, WIDE=wide, num_warps=chosen.expand_warps, num_stages=1, **pdl_options(y_RO.device),
        )  # fmt: skip


def add_lora(x_RI: Tensor, y_RO: Tensor, table: Tensor, work: LoraBatch, base_bias_O: Tensor | None = None) -> None:
    """Add the deltas of all rows to y, [R, O*], in place.

    `table`, int64 [slots, M, 4], holds `LoraOperand.entry` or `EMPTY_ENTRY` of every adapter
    and member. No rank in it is above the maximum of `work`.
    """
    shrink(x_RI, table, work)
    expand(y_RO, table, work, base_bias_O)
