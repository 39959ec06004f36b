"""Attention of the rows of a batch over the blocks of the KV cache.

R = rows of a batch, B = sequences, H = query heads, K = key heads (H = K × G), D = width of a head, S = slots of the KV
cache (slot = block × block size + offset), P = most blocks of a sequence, T = tiles, N = splits.

A decoding sequence has one row. Its keys are read once for all query heads of a key head, by several programs where
there are few sequences; `_merge_splits` combines their results in a fixed order. Rows of prefill are computed in tiles.
Lengths and block tables are read from device memory, so that a CUDA graph can be replayed for other sequences. A row
reads nothing of other sequences. Plain reference: `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.programmatic_launch import launch_dependents, pdl_options, wait_for_previous
from symbiosis.kernels.tiles import Span

_MULTIPROCESSORS = 132  # of an H200
_MAX_SPLITS = 64


def reference(
    q_RHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    spans: Sequence[Span],
    block_size: int,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    out_RHD = torch.zeros_like(q_RHD)
    groups = q_RHD.shape[1] // keys_SKD.shape[1]
    for span in spans:
        seen = torch.arange(span.before + span.count, device=q_RHD.device)
        slots = torch.tensor(span.block_table, device=q_RHD.device)[seen // block_size] * block_size + seen % block_size
        k, v = (memory[slots].float().repeat_interleave(groups, 1) for memory in (keys_SKD, values_SKD))
        rows = slice(span.start, span.start + span.count)
        scores_HRT = torch.einsum("rhd,thd->hrt", q_RHD[rows].float(), k) * scale
        if cap is not None:
            scores_HRT = cap * torch.tanh(scores_HRT / cap)
        position = seen[span.before :, None]
        allowed = seen <= position
        if window is not None:
            allowed &= seen > position - window
        weights = scores_HRT.masked_fill(~allowed, float("-inf")).softmax(-1)
        out_RHD[rows] = torch.einsum("hrt,thd->rhd", weights, v).to(q_RHD.dtype)
    return out_RHD


@triton.jit  # type: ignore[untyped-decorator]
def _score(q, k, scale, cap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores for exp2 instead of exp."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))  # cap × tanh
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _attend_block(  # type: ignore[no-untyped-def]
    q, top, total, sums, keys, values, table, t, inside, allowed, d, scale, cap, key_slot, value_slot,
    CAP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys at positions `t`; only those `inside` are read."""
    block = tl.load(table + t // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + t % BLOCK_SIZE
    mask = inside[:, None] & (d < D)[None, :]
    k = tl.load(keys + slot[:, None] * key_slot + d[None, :], mask=mask, other=0.0)
    v = tl.load(values + slot[:, None] * value_slot + d[None, :], mask=mask, other=0.0)
    scores = tl.where(allowed, _score(q, k, scale, cap, CAP), float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows without a key so far
    weights = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * keep[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit(do_not_specialize=["window", "sequences", "splits", "table_row"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q, keys, values, table, spans, out, parts, stats, scale, cap, window, sequences, splits,
    q_row, q_head, out_row, out_head, key_slot, key_head, value_slot, value_head, table_row,
    PDL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One row of a sequence: all query heads of one key head, over one split of its keys."""
    b, key, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(spans + b).to(tl.int64)
    count = tl.load(spans + sequences + b)
    position = tl.load(spans + 2 * sequences + b)
    g, d = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    heads = key * G + g
    mask = (g < G)[:, None] & (d < D)[None, :]
    out_at = out + row * out_row + heads[:, None] * out_head + d[None, :]
    wait_for_previous(PDL)
    if count <= 0:  # below 0: no row at all
        if not SPLIT:
            tl.store(out_at, tl.zeros((GROUP, WIDTH), dtype=out.dtype.element_ty), mask=mask & (count == 0))
        return
    low = 0
    if WINDOW:
        low = tl.maximum(position + 1 - window, 0)
    first = low // BLOCK_T
    each = tl.cdiv(tl.cdiv(position + 1, BLOCK_T) - first, splits)
    begin = (first + split * each) * BLOCK_T
    end = tl.minimum(begin + each * BLOCK_T, position + 1)
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
        top, total, sums = _attend_block(
            queries, top, total, sums, keys, values, table, t, inside, inside[None, :], d, scale, cap, key_slot, value_slot,
            CAP, D, BLOCK_SIZE,
        )  # fmt: skip
    if SPLIT:
        at = (b.to(tl.int64) * tl.num_programs(1) * G + heads) * splits + split
        tl.store(parts + at[:, None] * D + d[None, :], sums, mask=mask)
        tl.store(stats + at * 2, top, mask=g < G)
        tl.store(stats + at * 2 + 1, total, mask=g < G)
    else:
        tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences", "splits"])  # type: ignore[untyped-decorator]
def _merge_splits(  # type: ignore[no-untyped-def]
    parts, stats, spans, out, sequences, splits, out_row, out_head,
    D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one row, from its splits."""
    b, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(spans + b).to(tl.int64)
    count = tl.load(spans + sequences + b)
    n, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = (b.to(tl.int64) * tl.num_programs(1) + head) * splits + n
    real = (n < splits) & (count > 0)
    top = tl.load(stats + at * 2, mask=real, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=real, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    some = real & (top > float("-inf"))
    mask = some[:, None] & (d < D)[None, :]
    sums = tl.sum(tl.load(parts + at[:, None] * D + d[None, :], mask=mask, other=0.0) * weight[:, None], 0)
    whole = tl.sum(total * weight, 0)
    value = tl.where(count > 0, sums / tl.where(count > 0, whole, 1.0), 0.0)
    tl.store(out + row * out_row + head * out_head + d, value.to(out.dtype.element_ty), mask=(d < D) & (count >= 0))


@triton.jit(do_not_specialize=["window", "sequences", "capacity", "table_row"])  # type: ignore[untyped-decorator]
def _prefill(  # type: ignore[no-untyped-def]
    q, keys, values, table, spans, tiles, out, scale, cap, window, sequences, capacity,
    q_row, q_head, out_row, out_head, key_slot, key_head, value_slot, value_head, table_row,
    WINDOW: tl.constexpr, CAP: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One head of a tile of rows of one sequence, or of a part of the tile."""
    tile, part, head = tl.program_id(0) // (TILE // BLOCK_M), tl.program_id(0) % (TILE // BLOCK_M), tl.program_id(1)
    b = tl.load(tiles + tile)
    start = tl.load(tiles + capacity + tile) + part * BLOCK_M
    count = tl.minimum(tl.load(tiles + 2 * capacity + tile) - part * BLOCK_M, BLOCK_M)
    if (b < 0) | (count <= 0):
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    first = tl.load(spans + 2 * sequences + b) + start - tl.load(spans + b)
    position = first + m
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
        allowed = t[None, :] <= position[:, None]
        if WINDOW:
            allowed = allowed & (t[None, :] > position[:, None] - window)
        top, total, sums = _attend_block(
            queries, top, total, sums, keys, values, table, t, t < end, allowed, d, scale, cap, key_slot, value_slot,
            CAP, D, BLOCK_SIZE,
        )  # fmt: skip
    out_at = out + rows[:, None] * out_row + head * out_head + d[None, :]
    tl.store(out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    k, v, slots, keys, values, heads, k_row, k_head, v_row, v_head, key_slot, key_head, value_slot, value_head,
    PDL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_previous(PDL)
    if slot < 0:
        return
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (d < D)
    new_k = tl.load(k + row * k_row + head * k_head + d, mask=mask, other=0.0)
    new_v = tl.load(v + row * v_row + head * v_head + d, mask=mask, other=0.0)
    tl.store(keys + slot * key_slot + head * key_head + d, new_k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + slot * value_slot + head * value_head + d, new_v.to(values.dtype.element_ty), mask=mask)


def store(k_RKD: Tensor, v_RKD: Tensor, slots_R: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> None:
    """Store the keys and values of a batch to their slots; -1: not stored."""
    rows, heads, width = k_RKD.shape
    assert k_RKD.stride(2) == v_RKD.stride(2) == keys_SKD.stride(2) == values_SKD.stride(2) == 1
    wide = triton.next_power_of_2(width)
    heads_at_once = max(1, min(triton.next_power_of_2(heads), 4096 // wide))
    if rows:
        with torch.cuda.device_of(k_RKD):  # type: ignore[no-untyped-call]
            _store[(rows, triton.cdiv(heads, heads_at_once))](
                k_RKD, v_RKD, slots_R, keys_SKD, values_SKD, heads, *k_RKD.stride()[:2], *v_RKD.stride()[:2],
                *keys_SKD.stride()[:2], *values_SKD.stride()[:2], D=width, WIDTH=wide, HEADS=heads_at_once,
                **pdl_options(k_RKD.device),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the kernels are launched; `plan_launch` selects one by size."""

    splits: int
    decode_block: int
    """Keys per iteration."""
    prefill_block: int
    prefill_rows: int
    """Most rows of a program."""
    prefill_warps: int
    stages: int


def plan_launch(sequences: int, key_heads: int, width: int, longest: int, itemsize: int) -> AttentionPlan:
    splits = max(1, min(-(-longest // 256), -(-4 * _MULTIPROCESSORS // max(1, sequences * key_heads)), _MAX_SPLITS))
    block = max(16, min(64, 16384 // (triton.next_power_of_2(width) * itemsize)))
    is_half = itemsize == 2  # float32 runs without tensor cores: more rows would exceed the registers
    return AttentionPlan(
        splits=splits,
        decode_block=block,
        prefill_block=block,
        prefill_rows=64 if is_half else 16,
        prefill_warps=4 if width <= 128 else 8,
        stages=3 if is_half else 2,
    )


def attend(
    q_RHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    out_RHD: Tensor | None = None,
    chosen: AttentionPlan | None = None,
) -> Tensor:
    """The attention of each row over its sequence, [R, H, D]. Rows of no span are undefined.

    A row at position p attends to the last `window` positions up to p. Keys and values of the batch must be stored before.
    """
    rows, heads, width = q_RHD.shape
    _, key_heads, _ = keys_SKD.shape
    assert q_RHD.stride(2) == keys_SKD.stride(2) == values_SKD.stride(2) == 1
    assert heads % key_heads == 0, (heads, key_heads)
    out_RHD = torch.empty(rows, heads, width, dtype=q_RHD.dtype, device=q_RHD.device) if out_RHD is None else out_RHD
    chosen = chosen or plan_launch(batch.num_decodes, key_heads, width, batch.longest, q_RHD.element_size())
    groups, wide, sequences = heads // key_heads, max(16, triton.next_power_of_2(width)), batch.spans_3B.shape[1]
    numbers = (scale, cap or 1.0, window or 0, sequences)
    strides = (
        *q_RHD.stride()[:2], *out_RHD.stride()[:2], *keys_SKD.stride()[:2], *values_SKD.stride()[:2],
        batch.block_table_BP.stride(0),
    )  # fmt: skip
    same = {
        "WINDOW": window is not None, "CAP": cap is not None, "G": groups, "D": width, "WIDTH": wide,
        "BLOCK_SIZE": batch.block_size, "num_stages": chosen.stages,
    }  # fmt: skip
    with torch.cuda.device_of(q_RHD):  # type: ignore[no-untyped-call]
        if batch.num_decodes:
            split = chosen.splits > 1
            shape = (batch.num_decodes, heads, chosen.splits)
            parts = torch.empty(*shape, width, dtype=torch.float32, device=q_RHD.device) if split else out_RHD
            stats = torch.empty(*shape, 2, dtype=torch.float32, device=q_RHD.device) if split else out_RHD
            _decode[(batch.num_decodes, key_heads, chosen.splits)](
                q_RHD, keys_SKD, values_SKD, batch.block_table_BP, batch.spans_3B, out_RHD, parts, stats, *numbers,
                chosen.splits, *strides, SPLIT=split, GROUP=max(16, triton.next_power_of_2(groups)), 
                BLOCK_T=chosen.decode_block, num_warps=4, **same, **pdl_options(q_RHD.device),
            )  # fmt: skip
            if split:
                _merge_splits[(batch.num_decodes, heads)](
                    parts, stats, batch.spans_3B, out_RHD, sequences, chosen.splits, *out_RHD.stride()[:2],
                    D=width, WIDTH=wide, SPLITS=8 if chosen.splits <= 8 else _MAX_SPLITS, num_warps=4,
                )  # fmt: skip
        if batch.tiles is not None:
            prefill_rows = min(batch.tiles.rows, chosen.prefill_rows)
            _prefill[(batch.tiles.capacity * (batch.tiles.rows // prefill_rows), heads)](
                q_RHD, keys_SKD, values_SKD, batch.block_table_BP, batch.spans_3B, batch.tiles.device_3T, out_RHD, *numbers,
                batch.tiles.capacity, *strides, TILE=batch.tiles.rows, BLOCK_M=prefill_rows, BLOCK_T=chosen.prefill_block,
                num_warps=chosen.prefill_warps, **same,
            )  # fmt: skip
    return out_RHD
