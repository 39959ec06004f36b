"""Low-rank changes of many adapters in one pass: two launches for all adapters and all layers that read the same rows.

R = rows, I / O = input and output width, r = rank, M = members (layers that
read the same rows: q, k and v), O* = their outputs side by side, T = tiles, S = splits of the input width.

Rows of one adapter that lie together are cut into tiles. `_shrink` multiplies
the rows of a tile with its adapter's `a`, each program over a part of I;
`_expand` sums the parts, multiplies with `b` and adds to the layer's own result
in place. Weights are read where they lie, once per tile, over the adapter's own
rank. No atomics: results do not depend on timing. All that changes from pass to
pass is in device memory, so that a CUDA graph can be replayed for other rows
and adapters; and numbers that change are no reason to compile again. Tiles of
few rows, which is what decoding with different adapters gives, are multiplied
row by row without tensor cores (but for ranks above 64): they are bound by reading the weights,
which begins before the kernel before has ended. The rank's worth of numbers between
the two is rounded to the model's dtype, as PEFT does. Plain reference: `reference`.

Neither half needs the layer's own result. So `shrink` can run beside the product
that makes it, on another stream; and, where there is much to read, `b` can too:
`spread` keeps the change for whoever reads the result (`kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.lora.deferred import DeferredLora, stretched
from symbiosis.kernels.programmatic_launch import early, let_next_begin, wait_for_last
from symbiosis.kernels.tiles import Segment, Tiles

_PROCESSORS = 132  # of an H200
_ALIGNMENT = 16  # bytes
_MOST_SPLITS = 32
_DECODED = 64  # rows: up to here it may be all decoding
_FEW = 2  # rows that a program takes one by one, without tensor cores
_WIDEST = 64  # of the rank at once
_LEAST = 1024  # input columns of a part: what it takes is read again by every program of `_expand`
_ENOUGH = 1024  # programs: what would be more of them goes into the next block of one


@dataclass(frozen=True, slots=True)
class LoraOperand:
    """What one adapter does to one layer; the scale is in `b_Or`."""

    a_rI: Tensor
    b_Or: Tensor
    stretch_O: Tensor | None = None
    """DoRA: the whole product, without the layer's own bias, times this."""

    def entry(self) -> tuple[int, int, int, int]:
        """Its line of the table. Whoever writes it there keeps the tensors alive."""
        tensors = (self.a_rI, self.b_Or) if self.stretch_O is None else (self.a_rI, self.b_Or, self.stretch_O)
        rank = self.a_rI.shape[0]
        if self.b_Or.shape[1] != rank or len({t.dtype for t in tensors}) != 1:
            raise ValueError(
                f"a {tuple(self.a_rI.shape)} and b {tuple(self.b_Or.shape)} have one rank and one dtype with stretch"
            )
        if not all(t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 for t in tensors):
            raise ValueError(f"weights are contiguous and start at multiples of {_ALIGNMENT} bytes")
        stretch = 0 if self.stretch_O is None else self.stretch_O.data_ptr()
        return self.a_rI.data_ptr(), self.b_Or.data_ptr(), rank, stretch


NOTHING = (0, 0, 0, 0)
"""The line of an adapter that leaves this layer alone."""


class FusedWidths:
    """Layers that read the same rows, and where in y the outputs of each begin."""

    def __init__(self, widths: Sequence[int], device: torch.device | str) -> None:
        self.widths, self.device = tuple(widths), torch.device(device)
        self.even = all(width % 16 == 0 for width in widths)
        self._blocks: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.widths)

    def blocks(self, size: int) -> Tensor:
        """All outputs in blocks: (member, first column in y, first of its own columns, columns) of each."""
        if size not in self._blocks:
            found, offset = [], 0
            for member, width in enumerate(self.widths):
                found += [(member, offset + own, own, min(size, width - own)) for own in range(0, width, size)]
                offset += width
            self._blocks[size] = torch.tensor(found, dtype=torch.int32, device=self.device)
        return self._blocks[size]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How the kernels are launched; `plan` picks by size."""

    splits: int
    """Parts of the input width, each summed by a program of its own."""
    rank_programs: int
    """Programs that share the rank of an adapter."""
    block_k: int
    """Input columns of two bytes that a program reads at once; all it reads, where tiles have few rows."""
    block_n: int
    """Output columns a program computes at once."""
    blocks: int = 1
    """So many of these one after the other, the next being read meanwhile; where tiles have few rows."""
    shrink_warps: int = 4
    expand_warps: int = 4


def tile_rows(rows: int, segments: int, rmax: int) -> int:
    """How many rows a tile should have in a pass of so many, of so many adapters."""
    if rows <= _DECODED and rows < 16 * segments:  # mostly another adapter in every row
        return _FEW
    if 16 < rows <= _DECODED and segments == 1 and rmax > 32:  # much to read, once for all rows
        return 32 if rows <= 32 else 64
    return 16 if rows <= 256 else 64


def most_tiles(rows: int, tile: int) -> int:
    """Of any pass of up to so many rows whose tiles should have this many."""
    return 2 * -(-rows // tile) if rows <= _DECODED and tile > _FEW else rows


def plan(tiles: Tiles, width: int, widths: Sequence[int], rmax: int) -> LaunchPlan:
    programs = tiles.capacity * len(widths)
    ranks = -(-rmax // 16)
    if tiles.rows <= _FEW:
        block_k = 256
        while -(-width // block_k) > _MOST_SPLITS:
            block_k *= 2
        splits = -(-width // block_k)
        if rmax > 16:
            return LaunchPlan(splits, ranks, block_k, block_n=128)
        blocks = max(1, min(4, tiles.capacity * sum(widths) // (64 * _ENOUGH)))
        return LaunchPlan(splits, ranks, block_k, block_n=64, blocks=blocks, expand_warps=1)
    many = tiles.rows > 16
    wanted = _PROCESSORS // (programs * ranks) if many else -(-_PROCESSORS * 4 // programs)
    splits = max(1, min(-(-width // _LEAST), wanted, _MOST_SPLITS))
    block_k = 128 if many and programs * ranks * splits > _PROCESSORS else 256
    busy = tiles.capacity * sum(widths) >= 128 * _PROCESSORS  # with blocks of 256
    block_n, warps = (256, 4) if rmax <= 16 or (many and busy) else (128, 8)
    return LaunchPlan(splits, ranks, block_k, block_n, expand_warps=warps)


def reference(
    x_RI: Tensor,
    y_RO: Tensor,
    segments: Sequence[Segment],
    changes: Sequence[Sequence[LoraOperand | None]],
    widths: Sequence[int],
    own_bias_O: Tensor | None = None,
) -> None:
    """Add to y in place what the adapters do: `changes` by slot and member."""
    for segment in segments:
        if segment.slot < 0:
            continue
        rows, column = slice(segment.start, segment.start + segment.count), 0
        for change, width in zip(changes[segment.slot], widths, strict=True):
            columns = slice(column, column + width)
            column += width
            if change is None:
                continue
            low = (x_RI[rows].float() @ change.a_rI.float().T).to(x_RI.dtype)
            y = y_RO[rows, columns].float() + low.float() @ change.b_Or.float().T
            if change.stretch_O is not None:
                bias = 0.0 if own_bias_O is None else own_bias_O[columns].float()
                y = (y - bias) * change.stretch_O.float() + bias
            y_RO[rows, columns] = y.to(y_RO.dtype)


@triton.jit(do_not_specialize=["rows", "members", "capacity", "rank_programs", "table_stride"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, table, tiles, parts, rows, width, span, members, capacity, rank_programs, rmax, x_stride, table_stride,
    EARLY: tl.constexpr, FEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, member = tl.program_id(0), tl.program_id(2)
    split, turn = tl.program_id(1) // rank_programs, tl.program_id(1) % rank_programs
    let_next_begin(EARLY)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    if (slot < 0) | (count <= 0):
        wait_for_last(EARLY)
        return
    entry = table + slot.to(tl.int64) * table_stride + member * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= turn * 16:
        wait_for_last(EARLY)
        return
    a = tl.multiple_of(tl.load(entry).to(x.dtype), 16)
    begin = split * span
    end = tl.minimum(begin + span, width)
    x += start * x_stride
    parts += ((split * members + member).to(tl.int64) * rows + start) * rmax
    for first in range(turn * 16, rank, 16 * rank_programs):
        r = first + tl.arange(0, 16)
        a_rows = a + r.to(tl.int64)[:, None] * width
        if FEW:  # the span is one block
            k = begin + tl.arange(0, BLOCK_K)
            weight = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < end)[None, :], other=0.0)
            wait_for_last(EARLY)
            for m in range(count):
                row = tl.load(x + m * x_stride + k, mask=k < end, other=0.0)
                low = tl.sum(weight.to(tl.float32) * row.to(tl.float32)[None, :], 1)
                tl.store(parts + m * rmax + r, low, mask=r < rank)
        else:
            wait_for_last(EARLY)
            m = tl.arange(0, BLOCK_M)
            x_rows = x + m.to(tl.int64)[:, None] * x_stride
            sums = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
            for step in range(begin, end, BLOCK_K):
                k = step + tl.arange(0, BLOCK_K)
                weight = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < end)[None, :], other=0.0)
                row = tl.load(x_rows + k[None, :], mask=(m < count)[:, None] & (k < end)[None, :], other=0.0)
                sums = tl.dot(row, tl.trans(weight), sums, input_precision="ieee")
            tl.store(parts + m[:, None] * rmax + r[None, :], sums, mask=(m < count)[:, None] & (r < rank)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    y_at, change, mask, stretch, own_bias, column, own, inside,
    FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """A change by itself (`FRESH`), or added to what is there. One row or [rows, columns]; the latter are `inside`."""
    if not FRESH:
        change += tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        change = stretched(change, stretch, own_bias, column, own, inside, HAS_BIAS, SEVERAL)
    tl.store(y_at, change.to(y_at.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _expand_few(  # type: ignore[no-untyped-def]
    y, b, parts, own_bias, stretch, column, own, columns, rank, splits, split_stride, rmax, count, y_stride,
    EARLY: tl.constexpr, FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One or two rows, block by block. The weights are read in the order they lie in."""
    s, n, r = tl.arange(0, SPLITS), tl.arange(0, BLOCK_N), tl.arange(0, WIDE)
    weight_at = b + n.to(tl.int64)[:, None] * rank + r[None, :]
    weight = tl.load(weight_at, mask=(n < columns)[:, None] & (r < rank)[None, :], other=0.0)
    wait_for_last(EARLY)
    low_at = parts + s.to(tl.int64)[:, None] * split_stride + r[None, :]
    there = (s < splits)[:, None] & (r < rank)[None, :]
    low = tl.sum(tl.load(low_at, mask=there, other=0.0), 0).to(weight.dtype).to(tl.float32)
    other = tl.sum(tl.load(low_at + rmax, mask=there & (count > 1), other=0.0), 0).to(weight.dtype).to(tl.float32)
    for _ in range(0, columns, BLOCK_N):
        inside = n < columns
        now = weight.to(tl.float32)
        if AHEAD:
            weight_at += BLOCK_N * rank
            weight = tl.load(weight_at, mask=(n + BLOCK_N < columns)[:, None] & (r < rank)[None, :], other=0.0)
        y_at, change = y + column + n, tl.sum(now * low[None, :], 1)
        _write(y_at, change, inside, stretch, own_bias, column + n, own + n, inside, FRESH, HAS_BIAS, False)
        if count > 1:
            change = tl.sum(now * other[None, :], 1)
            _write(y_at + y_stride, change, inside, stretch, own_bias, column + n, own + n, inside, FRESH, HAS_BIAS, False)
        n += BLOCK_N


@triton.jit  # type: ignore[untyped-decorator]
def _expand_many(  # type: ignore[no-untyped-def]
    y, b, parts, own_bias, stretch, column, own, columns, rank, splits, split_stride, rmax, count, y_stride,
    EARLY: tl.constexpr, FRESH: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All rows at once, `WIDE` of the rank and `SPLITS` of the parts at a time."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows = m < count
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, rank, WIDE):
        r = first + tl.arange(0, WIDE)
        weight_at = b + n.to(tl.int64)[:, None] * rank + r[None, :]
        weight = tl.load(weight_at, mask=(n < columns)[:, None] & (r < rank)[None, :], other=0.0)
        wait_for_last(EARLY)
        low = tl.zeros((BLOCK_M, WIDE), dtype=tl.float32)
        for some in range(0, splits, SPLITS):
            s = some + tl.arange(0, SPLITS)
            low_at = parts + s.to(tl.int64)[:, None, None] * split_stride + m[None, :, None] * rmax + r[None, None, :]
            there = (s < splits)[:, None, None] & rows[None, :, None] & (r < rank)[None, None, :]
            low += tl.sum(tl.load(low_at, mask=there, other=0.0), 0)
        total = tl.dot(low.to(weight.dtype), tl.trans(weight), total, input_precision="ieee")
    mask = rows[:, None] & (n < columns)[None, :]
    y_at = y + m.to(tl.int64)[:, None] * y_stride + (column + n)[None, :]
    _write(y_at, total, mask, stretch, own_bias, column + n, own + n, n < columns, FRESH, HAS_BIAS, True)


@triton.jit(do_not_specialize=["rows", "capacity", "splits", "table_stride"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, table, tiles, blocks, parts, own_bias, rows, capacity, splits, split_stride, rmax, y_stride, table_stride,
    EARLY: tl.constexpr, FRESH: tl.constexpr, FEW: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), blocks + tl.program_id(1) * 4
    let_next_begin(EARLY)
    slot = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile).to(tl.int64)
    count = tl.load(tiles + 2 * capacity + tile)
    member = tl.load(block)
    column, own, columns = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if (slot < 0) | (count <= 0):
        wait_for_last(EARLY)
        return
    entry = table + slot.to(tl.int64) * table_stride + member * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank <= 0:
        wait_for_last(EARLY)
        return
    if EVEN:
        column, own, columns = tl.multiple_of(column, 16), tl.multiple_of(own, 16), tl.multiple_of(columns, 16)
    stretch = tl.load(entry + 3)
    y += start * y_stride
    b = tl.multiple_of(tl.load(entry + 1).to(own_bias.dtype), 16) + tl.multiple_of(own.to(tl.int64) * rank, 8)
    parts += (member.to(tl.int64) * rows + start) * rmax
    # Rows of b that start at multiples of 16 bytes can be read 16 bytes at a time, if the compiler is told so.
    even = (rank // 8) * 8
    if FEW:
        if even == rank:
            _expand_few(
                y, b, parts, own_bias, stretch, column, own, columns, even, splits, split_stride, rmax, count, y_stride,
                EARLY, FRESH, HAS_BIAS, SPLITS, BLOCK_N, AHEAD, WIDE,
            )  # fmt: skip
        else:
            _expand_few(
                y, b, parts, own_bias, stretch, column, own, columns, rank, splits, split_stride, rmax, count, y_stride,
                EARLY, FRESH, HAS_BIAS, SPLITS, BLOCK_N, AHEAD, WIDE,
            )  # fmt: skip
    elif even == rank:
        _expand_many(
            y, b, parts, own_bias, stretch, column, own, columns, even, splits, split_stride, rmax, count, y_stride,
            EARLY, FRESH, HAS_BIAS, AT_ONCE, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
    else:
        _expand_many(
            y, b, parts, own_bias, stretch, column, own, columns, rank, splits, split_stride, rmax, count, y_stride,
            EARLY, FRESH, HAS_BIAS, AT_ONCE, BLOCK_M, BLOCK_N, 16,
        )  # fmt: skip


class LoraBatch:
    """What layers of one kind need in a pass: a plan, and room for what one kernel hands to the next.

    Another layer may have it once this one's change is added.
    """

    def __init__(
        self, tiles: Tiles, rows: int, width: int, members: FusedWidths, rmax: int, chosen: LaunchPlan | None = None
    ) -> None:
        self.tiles, self.members = tiles, members
        self.few = tiles.rows <= _FEW
        """It is nearly all reading, so beside a product the second half, too, is worth it."""
        self.plan = chosen or plan(tiles, width, members.widths, rmax)
        shape = (self.plan.splits, len(members), rows, rmax)
        self.parts_SMRr = torch.empty(shape, dtype=torch.float32, device=members.device)

        self.change_RO = torch.empty(0, 0, dtype=torch.float32, device=members.device)
        """What `spread` keeps, once there is room for it."""

    def make_room(self) -> None:
        """For `change_RO`, on the stream that it will be read on."""
        if not self.change_RO.numel():
            self.change_RO = self.change_RO.new_empty(self.parts_SMRr.shape[2], sum(self.members.widths))


def shrink(x_RI: Tensor, table: Tensor, work: LoraBatch, *, apart: bool = False) -> None:
    """Rows times `a`, in parts over the input width. `apart`: on another stream than what made the rows."""
    splits, members, rows, rmax = work.parts_SMRr.shape
    tiles, chosen = work.tiles, work.plan
    assert rmax % 16 == 0, rmax
    assert members == table.shape[1], (work.members.widths, table.shape)
    assert rows >= x_RI.shape[0], (rows, x_RI.shape)
    assert (x_RI.stride(1), table.stride(1), table.stride(2)) == (1, 4, 1)
    block_k = chosen.block_k if work.few else 2 * chosen.block_k // x_RI.element_size()
    span = block_k if work.few else -(-x_RI.shape[1] // (splits * block_k)) * block_k
    assert splits * span >= x_RI.shape[1], (chosen, x_RI.shape)
    with torch.cuda.device_of(x_RI):  # type: ignore[no-untyped-call]
        _shrink[(tiles.capacity, splits * chosen.rank_programs, members)](
            x_RI, table, tiles.device_3T, work.parts_SMRr, rows, x_RI.shape[1], span, members, tiles.capacity,
            chosen.rank_programs, rmax, x_RI.stride(0), table.stride(0),
            FEW=work.few, BLOCK_M=max(16, tiles.rows), BLOCK_K=block_k,
            num_warps=chosen.shrink_warps, num_stages=3, **early(x_RI.device, waits=apart),
        )  # fmt: skip


def expand(y_RO: Tensor, table: Tensor, work: LoraBatch, own_bias_O: Tensor | None = None) -> None:
    """The parts together times `b`, added to y, [R, O*] in place. `own_bias_O` is in y already; only DoRA asks for it.

    y and the parts may come from different streams.
    """
    bias_O = y_RO if own_bias_O is None else own_bias_O
    _launch_expand(y_RO, bias_O, table, work, has_bias=own_bias_O is not None, fresh=False)


def spread(table: Tensor, work: LoraBatch, like: Tensor, own_bias_O: Tensor | None = None) -> DeferredLora:
    """The parts together times `b`, kept in `work`. `like` has the dtype of the weights."""
    _launch_expand(work.change_RO, like, table, work, has_bias=False, fresh=True)
    return DeferredLora(work.change_RO, table, work.tiles.slots_R, own_bias_O)


def _launch_expand(y_RO: Tensor, own_bias_O: Tensor, table: Tensor, work: LoraBatch, *, has_bias: bool, fresh: bool) -> None:
    """Without a bias, `own_bias_O` only tells the weights' dtype: of what is fresh, y has another."""
    splits, _, rows, rmax = work.parts_SMRr.shape
    tiles, members, chosen = work.tiles, work.members, work.plan
    assert (y_RO.shape[1], y_RO.stride(1)) == (sum(members.widths), 1), (y_RO.shape, members.widths)
    few = work.few and rmax <= _WIDEST
    blocks = members.blocks(chosen.block_n * chosen.blocks if few else chosen.block_n)
    block_m, every = max(16, tiles.rows), triton.next_power_of_2(splits)
    wide = min(_WIDEST, triton.next_power_of_2(rmax))
    with torch.cuda.device_of(y_RO):  # type: ignore[no-untyped-call]
        _expand[(tiles.capacity, blocks.shape[0])](
            y_RO, table, tiles.device_3T, blocks, work.parts_SMRr, own_bias_O,
            rows, tiles.capacity, splits, work.parts_SMRr.stride(0), rmax, y_RO.stride(0), table.stride(0),
            FRESH=fresh, FEW=few, HAS_BIAS=has_bias, EVEN=members.even, SPLITS=every,
            AT_ONCE=max(1, min(8, every, 8192 // (block_m * wide))), BLOCK_M=block_m, BLOCK_N=chosen.block_n,
            AHEAD=chosen.blocks > 1, WIDE=wide, num_warps=chosen.expand_warps, num_stages=1, **early(y_RO.device),
        )  # fmt: skip


def low_rank(x_RI: Tensor, y_RO: Tensor, table: Tensor, work: LoraBatch, own_bias_O: Tensor | None = None) -> None:
    """Add to y, [R, O*] in place, what the adapters of all rows do.

    `table`, int64 [slots, M, 4], holds `LoraOperand.entry` or `NOTHING` of every adapter
    and member; no rank in it is above that of `work`.
    """
    shrink(x_RI, table, work)
    expand(y_RO, table, work, own_bias_O)
