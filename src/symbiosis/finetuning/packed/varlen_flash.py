"""Causal attention of sequences of different lengths in one call, by the flash kernels inside torch.

R = rows of all sequences, H / K = query and key heads, D = width of a head. Reference: one call for each sequence
(`attention`). The kernels read and write a sequence's own rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symbiosis.kernels.first_order import first_order

_WIDEST = 256


def takes(q_HRD: Tensor) -> bool:
    wide = q_HRD.shape[-1]
    return q_HRD.is_cuda and q_HRD.dtype in (torch.bfloat16, torch.float16) and wide <= _WIDEST and wide % 8 == 0


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float) -> Tensor:
        out, sums, *random = torch.ops.aten._flash_attention_forward(
            q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, sums, edges, *random[:2])
        ctx.longest, ctx.scale = longest, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, sums, edges, *random = ctx.saved_tensors
        n = ctx.longest
        found = torch.ops.aten._flash_attention_backward(
            upstream.contiguous(), q, k, v, out, sums, edges, edges, n, n, 0.0, True, *random, scale=ctx.scale
        )
        return *found, None, None, None


def attention(q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, edges_S: Tensor, longest: int, scale: float) -> Tensor:
    """What each row reads from its sequence, [H, R, D]; sequences end at the edges."""
    q, k, v = (x.transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
    found: Tensor = _Flash.apply(q, k, v, edges_S, longest, scale)  # type: ignore[no-untyped-call]
    return found.transpose(0, 1)
