"""Rotary positions of queries and keys, and keys and values stored to the KV cache, in one launch.

R = rows, H = query heads, K = key heads, D = width of a head, S = slots of the KV cache. The three are columns of one
projection, which may have a LoRA delta (`deferred`). For inference: no gradient. Plain reference: `reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels import rotary
from symbiosis.kernels.launcher import Launcher
from symbiosis.kernels.lora.deferred import DeferredLora, add_delta, delta_arguments, find_delta
from symbiosis.kernels.programmatic_launch import launch_dependents, supports_pdl, wait_for_previous
from symbiosis.kernels.rounding import rounded

_BLOCK = 1024  # numbers of a program


def reference(qkv_RO: Tensor, cos_RD: Tensor, sin_RD: Tensor, slots_R: Tensor, keys_SKD: Tensor, values_SKD: Tensor) -> Tensor:
    """The queries, [R, H, D]. Keys and values are stored, except for rows whose slot is -1."""
    rows, (_, heads, width) = qkv_RO.shape[0], keys_SKD.shape
    q_RHD, k_RKD, v_RKD = qkv_RO.view(rows, -1, width).tensor_split([-2 * heads, -heads], dim=1)
    rotated = rotary.reference(q_RHD.transpose(0, 1)[None], k_RKD.transpose(0, 1)[None], cos_RD[None], sin_RD[None])
    q_RHD, k_RKD = (x[0].transpose(0, 1) for x in rotated)
    real = slots_R >= 0
    keys_SKD[slots_R[real].long()], values_SKD[slots_R[real].long()] = k_RKD[real], v_RKD[real]
    return q_RHD


@triton.jit
def _store(at, first, second, half, mask):  # type: ignore[no-untyped-def]
    """Store both halves of heads."""
    kind: tl.constexpr = at.dtype.element_ty
    tl.store(at, first.to(kind), mask=mask)
    tl.store(at + half, second.to(kind), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])  # type: ignore[untyped-decorator]
def _rope_and_store(  # type: ignore[no-untyped-def]
    qkv, cos, sin, kv_slots, q_out, keys, values, q_heads, k_heads, half, q_blocks, k_blocks,
    qkv_stride, cos_stride, sin_stride,
    key_slot, key_head, value_slot, value_head, delta, table, slots, base_bias, delta_stride, table_stride,
    DEFERRED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: queries, keys or values."""
    launch_dependents(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = (block >= q_blocks).to(tl.int32) + (block >= q_blocks + k_blocks).to(tl.int32)
    block -= tl.where(member > 0, q_blocks, 0) + tl.where(member > 1, k_blocks, 0)
    before = tl.where(member > 0, q_heads, 0) + tl.where(member > 1, k_heads, 0)
    head, d = block * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (head < tl.where(member > 0, k_heads, q_heads)) & (d < half)
    own = head * (2 * half) + d
    column = before * (2 * half) + own
    kind: tl.constexpr = q_out.dtype.element_ty
    kv_slot = tl.load(kv_slots + row).to(tl.int64)
    wait_for_previous(PDL)
    at = qkv + row * qkv_stride + column
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if DEFERRED:
        has, scale_at = find_delta(table, slots, row, member, table_stride)
        first = add_delta(first, delta, base_bias, has, scale_at, row, column, own, mask, delta_stride, kind, HAS_BIAS)
        second = add_delta(
            second, delta, base_bias, has, scale_at, row, column + half, own + half, mask, delta_stride, kind, HAS_BIAS
        )
    if member < 2:
        cos_at, sin_at, known = cos + row * cos_stride + d, sin + row * sin_stride + d, d < half
        cos_1 = tl.load(cos_at, mask=known, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos_at + half, mask=known, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin_at, mask=known, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin_at + half, mask=known, other=0.0).to(tl.float32)
        # each product is rounded before the sum, as in the reference
        above = rounded(first * cos_1, kind) - rounded(second * sin_1, kind)
        second = rounded(second * cos_2, kind) + rounded(first * sin_2, kind)
        first = above
    if member == 0:
        _store(q_out + row * q_heads * (2 * half) + own, first, second, half, mask)
    elif kv_slot >= 0:
        if member == 1:
            _store(keys + kv_slot * key_slot + head * key_head + d, first, second, half, mask)
        else:
            _store(values + kv_slot * value_slot + head * value_head + d, first, second, half, mask)


_launch = Launcher(_rope_and_store)


def rope_and_store(
    qkv_RO: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    slots_R: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    deferred: DeferredLora | None = None,
) -> Tensor:
    """The rotated queries, [R, H, D]. Keys and values are stored to their slots (-1: not stored)."""
    (rows, outputs), (_, k_heads, width), pdl = qkv_RO.shape, keys_SKD.shape, supports_pdl(qkv_RO.device)
    q_heads = outputs // width - 2 * k_heads
    assert qkv_RO.stride(1) == cos_RD.stride(1) == sin_RD.stride(1) == keys_SKD.stride(2) == values_SKD.stride(2) == 1
    assert keys_SKD.dtype == values_SKD.dtype, (keys_SKD.dtype, values_SKD.dtype)
    assert width % 2 == 0, width
    assert cos_RD.shape == sin_RD.shape == (rows, width), (cos_RD.shape, sin_RD.shape, rows, width)
    q_RHD = torch.empty(rows, q_heads, width, dtype=qkv_RO.dtype, device=qkv_RO.device)
    half = int(triton.next_power_of_2(width // 2))
    heads = max(1, min(int(triton.next_power_of_2(q_heads)), _BLOCK // (2 * half)))
    q_blocks, k_blocks = -(-q_heads // heads), -(-k_heads // heads)
    if rows:
        _launch(
            (rows, q_blocks + 2 * k_blocks, 1), qkv_RO, qkv_RO, cos_RD, sin_RD, slots_R, q_RHD, keys_SKD, values_SKD,
            q_heads, k_heads, width // 2, q_blocks, k_blocks, qkv_RO.stride(0), cos_RD.stride(0), sin_RD.stride(0),
            *keys_SKD.stride()[:2], *values_SKD.stride()[:2], *delta_arguments(deferred, qkv_RO), pdl, heads, half,
            pdl=pdl,
        )  # fmt: skip
    return q_RHD
