"""Causal attention of sequences of different lengths in one call of torch's flash kernels.

R = rows of all sequences, H / K = query and key heads, D = width of a head. Reference: one call per sequence
(`attention`). The kernels read and write a sequence's own rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symbiosis.kernels.first_order import first_order

_MAX_WIDTH = 256


def supports(q_HRD: Tensor) -> bool:
    width = q_HRD.shape[-1]
    return q_HRD.is_cuda and q_HRD.dtype in (torch.bfloat16, torch.float16) and width <= _MAX_WIDTH and width % 8 == 0


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, max_length: int, scale: float) -> Tensor:
        out, logsumexp, *rng_state = torch.ops.aten._flash_attention_forward(
            q, k, v, edges, edges, max_length, max_length, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, edges, *rng_state[:2])
        ctx.max_length, ctx.scale = max_length, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, logsumexp, edges, *rng_state = ctx.saved_tensors
        n = ctx.max_length
        gradients = torch.ops.aten._flash_attention_backward(
            upstream.contiguous(), q, k, v, out, logsumexp, edges, edges, n, n, 0.0, True, *rng_state, scale=ctx.scale
        )
        return *gradients, None, None, None


def attention(q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, edges_S: Tensor, max_length: int, scale: float) -> Tensor:
    """The attention of each row, [H, R, D]. `edges_S`: first rows of the sequences, and the end of the last."""
    q, k, v = (x.transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
    result: Tensor = _Flash.apply(q, k, v, edges_S, max_length, scale)  # type: ignore[no-untyped-call]
    return result.transpose(0, 1)
