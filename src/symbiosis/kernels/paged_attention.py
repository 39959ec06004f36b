"""Attention of the rows of a pass over pages of keys and values.

R = rows of a pass, B = sequences, H = query heads, K = key heads (H = K × G), D = width of a head,
S = slots of the memory (slot = page × page size + offset), P = most pages of a sequence, T = tiles, N = splits.

A sequence with one row (decoding) is read once for all query heads of a key
head, by several programs where there are few sequences; `_join` puts their
results together in a fixed order. Rows of a longer piece (a prompt) are
computed in tiles. Lengths and pages are read from device memory, so that a CUDA
graph can be replayed for other sequences. Nothing of another sequence is read.
Plain reference: `reference`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.programmatic_launch import early, let_next_begin, wait_for_last
from symbiosis.kernels.tiles import Segment, Span, Tiles

_PROCESSORS = 132  # of an H200
_MOST_SPLITS = 64


class AttentionBatch:
    """Which rows see what, on the device. Made once, used by all layers.

    As `AttentionBatch(...)` it has room for so many rows that decode, one of a sequence
    each, and can be filled again in place, between replays of a CUDA graph.
    """

    def __init__(
        self, *, rows: int, max_pages: int, page_size: int, device: torch.device | str, sequences: int | None = None
    ) -> None:
        sequences = rows if sequences is None else sequences
        self.page_size, self.longest = page_size, max_pages * page_size
        shapes = ((3, sequences), (rows,), (sequences, max_pages))
        # each part starts at a multiple of 16 bytes: kernels are compiled for that
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in shapes]
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._device = self._host.to(device)
        self.facts_3B, self.slots_R, self.table_BP = _cut(self._device, shapes, sizes)
        self._facts, self._slots, self._table = (part.numpy() for part in _cut(self._host, shapes, sizes))
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self.single = sequences
        """The first so many sequences have one row each, or none."""
        self.tiles: Tiles | None = None

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int, device: torch.device | str) -> AttentionBatch:
        """Just as large as these need; one or more rows each."""
        ordered = sorted(spans, key=lambda span: span.count > 1)
        rows = max((span.start + span.count for span in spans), default=0)
        most = max((len(span.pages) for span in spans), default=0)
        made = cls(rows=rows, max_pages=max(1, most), page_size=page_size, device=device, sequences=len(spans))
        made.single = sum(span.count == 1 for span in spans)
        several = [Segment(b, span.start, span.count) for b, span in enumerate(ordered) if span.count > 1]
        if several:
            longest = max(segment.count for segment in several)
            made.tiles = Tiles.of(several, 16 if longest <= 16 else 64, device)
        made._set(ordered)
        return made

    def fill(self, spans: Sequence[Span]) -> None:
        """The next pass, in the order of the current stream: one row each; rows that nobody names become zeros."""
        if len(spans) > len(self._pages) or any(span.count != 1 for span in spans):
            raise ValueError(f"{len(spans)} sequences where there is room for {len(self._pages)} of one row each")
        idle = set(range(len(self._slots))) - {span.start for span in spans}
        self._set([*spans, *(Span(row, 0, 0, ()) for row in sorted(idle))])

    def _set(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        self._facts[:] = np.array([(span.start, span.count, span.before) for span in spans], dtype=np.int32).T
        for b, span in enumerate(spans):
            pages = list(span.pages)
            if pages != self._pages[b]:
                self._table[b, : len(pages)] = pages
                self._pages[b] = pages
        self._slots[:] = -1
        start, count, before = self._facts
        page, offset = np.divmod(before, self.page_size)
        self._slots[start] = np.where(count > 0, self._table[np.arange(len(spans)), page] * self.page_size + offset, -1)
        for b, span in enumerate(spans):
            if span.count > 1:
                page, offset = np.divmod(np.arange(span.before, span.before + span.count), self.page_size)
                self._slots[span.start : span.start + span.count] = self._table[b, page] * self.page_size + offset
        host = self._host.pin_memory() if self._device.is_cuda else self._host
        self._device.copy_(host, non_blocking=True)


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(flat[start : start + math.prod(shape)].view(shape) for shape, start in zip(shapes, starts, strict=False))


def reference(
    q_RHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    spans: Sequence[Span],
    page_size: int,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    out_RHD = torch.zeros_like(q_RHD)
    groups = q_RHD.shape[1] // keys_SKD.shape[1]
    for span in spans:
        seen = torch.arange(span.before + span.count, device=q_RHD.device)
        slots = torch.tensor(span.pages, device=q_RHD.device)[seen // page_size] * page_size + seen % page_size
        k, v = (memory[slots].float().repeat_interleave(groups, 1) for memory in (keys_SKD, values_SKD))
        rows = slice(span.start, span.start + span.count)
        scores_HRT = torch.einsum("rhd,thd->hrt", q_RHD[rows].float(), k) * scale
        if cap is not None:
            scores_HRT = cap * torch.tanh(scores_HRT / cap)
        place = seen[span.before :, None]
        allowed = seen <= place
        if window is not None:
            allowed &= seen > place - window
        shares = scores_HRT.masked_fill(~allowed, float("-inf")).softmax(-1)
        out_RHD[rows] = torch.einsum("hrt,thd->rhd", shares, v).to(q_RHD.dtype)
    return out_RHD


@triton.jit  # type: ignore[untyped-decorator]
def _scored(q, k, scale, cap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores to the base of 2."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))  # cap × tanh
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    q, top, total, sums, keys, values, table, t, inside, allowed, d, scale, cap, key_slot, value_slot,
    CAP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys at places `t`; only those `inside` are read."""
    page = tl.load(table + t // PAGE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE + t % PAGE
    mask = inside[:, None] & (d < D)[None, :]
    k = tl.load(keys + slot[:, None] * key_slot + d[None, :], mask=mask, other=0.0)
    v = tl.load(values + slot[:, None] * value_slot + d[None, :], mask=mask, other=0.0)
    scores = tl.where(allowed, _scored(q, k, scale, cap, CAP), float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
    shares = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(shares, 1)
    sums = tl.dot(shares.to(v.dtype), v, sums * keep[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit(do_not_specialize=["window", "sequences", "splits", "table_row"])  # type: ignore[untyped-decorator]
def _single(  # type: ignore[no-untyped-def]
    q, keys, values, table, facts, out, parts, marks, scale, cap, window, sequences, splits,
    q_row, q_head, out_row, out_head, key_slot, key_head, value_slot, value_head, table_row,
    EARLY: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One row of a sequence: all query heads of one key head, over one of the splits of what it sees."""
    b, key, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(facts + b).to(tl.int64)
    count = tl.load(facts + sequences + b)
    place = tl.load(facts + 2 * sequences + b)
    g, d = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    heads = key * G + g
    mask = (g < G)[:, None] & (d < D)[None, :]
    out_at = out + row * out_row + heads[:, None] * out_head + d[None, :]
    wait_for_last(EARLY)
    if count <= 0:
        if not SPLIT:
            tl.store(out_at, tl.zeros((GROUP, WIDTH), dtype=out.dtype.element_ty), mask=mask)
        return
    low = 0
    if WINDOW:
        low = tl.maximum(place + 1 - window, 0)
    first = low // BLOCK_T
    each = tl.cdiv(tl.cdiv(place + 1, BLOCK_T) - first, splits)
    begin = (first + split * each) * BLOCK_T
    end = tl.minimum(begin + each * BLOCK_T, place + 1)
    queries = tl.load(q + row * q_row + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    keys += key.to(tl.int64) * key_head
    values += key.to(tl.int64) * value_head
    table += b.to(tl.int64) * table_row
    top = tl.full((GROUP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    sums = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (t < end) & (t >= low)
        top, total, sums = _step(
            queries, top, total, sums, keys, values, table, t, inside, inside[None, :], d, scale, cap, key_slot, value_slot,
            CAP, D, PAGE,
        )  # fmt: skip
    if SPLIT:
        at = (b.to(tl.int64) * tl.num_programs(1) * G + heads) * splits + split
        tl.store(parts + at[:, None] * D + d[None, :], sums, mask=mask)
        tl.store(marks + at * 2, top, mask=g < G)
        tl.store(marks + at * 2 + 1, total, mask=g < G)
    else:
        tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences", "splits"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts, marks, facts, out, sequences, splits, out_row, out_head,
    D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one row, from its splits."""
    b, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(facts + b).to(tl.int64)
    count = tl.load(facts + sequences + b)
    n, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = (b.to(tl.int64) * tl.num_programs(1) + head) * splits + n
    real = (n < splits) & (count > 0)
    top = tl.load(marks + at * 2, mask=real, other=float("-inf"))
    total = tl.load(marks + at * 2 + 1, mask=real, other=0.0)
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    some = real & (top > float("-inf"))
    mask = some[:, None] & (d < D)[None, :]
    sums = tl.sum(tl.load(parts + at[:, None] * D + d[None, :], mask=mask, other=0.0) * share[:, None], 0)
    whole = tl.sum(total * share, 0)
    value = tl.where(count > 0, sums / tl.where(count > 0, whole, 1.0), 0.0)
    tl.store(out + row * out_row + head * out_head + d, value.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["window", "sequences", "capacity", "table_row"])  # type: ignore[untyped-decorator]
def _several(  # type: ignore[no-untyped-def]
    q, keys, values, table, facts, tiles, out, scale, cap, window, sequences, capacity,
    q_row, q_head, out_row, out_head, key_slot, key_head, value_slot, value_head, table_row,
    WINDOW: tl.constexpr, CAP: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one sequence, or a part of it, one head."""
    tile, part, head = tl.program_id(0) // (TILE // BLOCK_M), tl.program_id(0) % (TILE // BLOCK_M), tl.program_id(1)
    b = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile) + part * BLOCK_M
    count = tl.minimum(tl.load(tiles + 2 * capacity + tile) - part * BLOCK_M, BLOCK_M)
    if (b < 0) | (count <= 0):
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    first = tl.load(facts + 2 * sequences + b) + start - tl.load(facts + b)
    place = first + m
    end = first + count
    begin = 0
    if WINDOW:
        begin = (tl.maximum(first + 1 - window, 0) // BLOCK_T) * BLOCK_T
    rows = start.to(tl.int64) + m
    mask = (m < count)[:, None] & (d < D)[None, :]
    queries = tl.load(q + rows[:, None] * q_row + head * q_head + d[None, :], mask=mask, other=0.0)
    keys += (head // G).to(tl.int64) * key_head
    values += (head // G).to(tl.int64) * value_head
    table += b.to(tl.int64) * table_row
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sums = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    for block in range(begin, end, BLOCK_T):
        t = block + tl.arange(0, BLOCK_T)
        allowed = t[None, :] <= place[:, None]
        if WINDOW:
            allowed = allowed & (t[None, :] > place[:, None] - window)
        top, total, sums = _step(
            queries, top, total, sums, keys, values, table, t, t < end, allowed, d, scale, cap, key_slot, value_slot,
            CAP, D, PAGE,
        )  # fmt: skip
    out_at = out + rows[:, None] * out_row + head * out_head + d[None, :]
    tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    k, v, slots, keys, values, heads, k_row, k_head, v_row, v_head, key_slot, key_head, value_slot, value_head,
    EARLY: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_last(EARLY)
    if slot < 0:
        return
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (d < D)
    new_k = tl.load(k + row * k_row + head * k_head + d, mask=mask, other=0.0)
    new_v = tl.load(v + row * v_row + head * v_head + d, mask=mask, other=0.0)
    tl.store(keys + slot * key_slot + head * key_head + d, new_k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + slot * value_slot + head * value_head + d, new_v.to(values.dtype.element_ty), mask=mask)


def store(k_RKD: Tensor, v_RKD: Tensor, slots_R: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> None:
    """Write the keys and values of a pass to their slots; -1: nowhere."""
    rows, heads, width = k_RKD.shape
    assert k_RKD.stride(2) == v_RKD.stride(2) == keys_SKD.stride(2) == values_SKD.stride(2) == 1
    wide = triton.next_power_of_2(width)
    together = max(1, min(triton.next_power_of_2(heads), 4096 // wide))
    if rows:
        with torch.cuda.device_of(k_RKD):  # type: ignore[no-untyped-call]
            _store[(rows, triton.cdiv(heads, together))](
                k_RKD, v_RKD, slots_R, keys_SKD, values_SKD, heads, *k_RKD.stride()[:2], *v_RKD.stride()[:2],
                *keys_SKD.stride()[:2], *values_SKD.stride()[:2], D=width, WIDTH=wide, HEADS=together, **early(k_RKD.device),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the kernels are launched; `plan` picks by size."""

    splits: int
    single_block: int
    """Keys a step, of one row."""
    several_block: int
    several_rows: int
    """Rows a program, at most."""
    several_warps: int
    stages: int


def plan(sequences: int, key_heads: int, width: int, longest: int, itemsize: int) -> AttentionPlan:
    splits = max(1, min(-(-longest // 256), -(-4 * _PROCESSORS // max(1, sequences * key_heads)), _MOST_SPLITS))
    block = max(16, min(64, 16384 // (triton.next_power_of_2(width) * itemsize)))
    small = itemsize == 2  # float32 has no tensor cores here: few rows, or registers do not suffice
    return AttentionPlan(
        splits=splits,
        single_block=block,
        several_block=block,
        several_rows=64 if small else 16,
        several_warps=4 if width <= 128 else 8,
        stages=3 if small else 2,
    )


def attend(
    q_RHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    now: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    out_RHD: Tensor | None = None,
    chosen: AttentionPlan | None = None,
) -> Tensor:
    """What each row reads from its sequence, [R, H, D]; all of the pass's rows are written.

    A row at place p sees the places up to p, of these the last `window` only. Keys and values of this pass are stored before.
    """
    rows, heads, width = q_RHD.shape
    _, key_heads, _ = keys_SKD.shape
    assert q_RHD.stride(2) == keys_SKD.stride(2) == values_SKD.stride(2) == 1
    assert heads % key_heads == 0, (heads, key_heads)
    out_RHD = torch.empty(rows, heads, width, dtype=q_RHD.dtype, device=q_RHD.device) if out_RHD is None else out_RHD
    chosen = chosen or plan(now.single, key_heads, width, now.longest, q_RHD.element_size())
    groups, wide, sequences = heads // key_heads, max(16, triton.next_power_of_2(width)), now.facts_3B.shape[1]
    numbers = (scale, cap or 1.0, window or 0, sequences)
    strides = (
        *q_RHD.stride()[:2], *out_RHD.stride()[:2], *keys_SKD.stride()[:2], *values_SKD.stride()[:2], now.table_BP.stride(0)
    )  # fmt: skip
    same = {
        "WINDOW": window is not None, "CAP": cap is not None, "G": groups, "D": width, "WIDTH": wide, "PAGE": now.page_size,
        "num_stages": chosen.stages,
    }  # fmt: skip
    with torch.cuda.device_of(q_RHD):  # type: ignore[no-untyped-call]
        if now.single:
            split = chosen.splits > 1
            shape = (now.single, heads, chosen.splits)
            parts = torch.empty(*shape, width, dtype=torch.float32, device=q_RHD.device) if split else out_RHD
            marks = torch.empty(*shape, 2, dtype=torch.float32, device=q_RHD.device) if split else out_RHD
            _single[(now.single, key_heads, chosen.splits)](
                q_RHD, keys_SKD, values_SKD, now.table_BP, now.facts_3B, out_RHD, parts, marks, *numbers,
                chosen.splits, *strides, SPLIT=split, GROUP=max(16, triton.next_power_of_2(groups)), 
                BLOCK_T=chosen.single_block, num_warps=4, **same, **early(q_RHD.device),
            )  # fmt: skip
            if split:
                _join[(now.single, heads)](
                    parts, marks, now.facts_3B, out_RHD, sequences, chosen.splits, *out_RHD.stride()[:2],
                    D=width, WIDTH=wide, SPLITS=8 if chosen.splits <= 8 else _MOST_SPLITS, num_warps=4,
                )  # fmt: skip
        if now.tiles is not None:
            several_rows = min(now.tiles.rows, chosen.several_rows)
            _several[(now.tiles.capacity * (now.tiles.rows // several_rows), heads)](
                q_RHD, keys_SKD, values_SKD, now.table_BP, now.facts_3B, now.tiles.device_3T, out_RHD, *numbers,
                now.tiles.capacity, *strides, TILE=now.tiles.rows, BLOCK_M=several_rows, BLOCK_T=chosen.several_block,
                num_warps=chosen.several_warps, **same,
            )  # fmt: skip
    return out_RHD
