"""Cross entropy of each row of logits, in one launch forward and one backward, without a float32 copy of the logits.

R = rows, V = vocabulary. Plain reference: `reference`. It makes several float32 copies of [R, V]. For a vocabulary of
128k these are most of the memory, and much of the GPU time, of a small model's optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.first_order import first_order

_BLOCK = 4096


def reference(logits_RV: Tensor, labels_R: Tensor, ignore: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_RV.float(), labels_R, ignore_index=ignore, reduction="none")


@triton.jit  # type: ignore[untyped-decorator]
def _forward(logits, labels, losses, sums, width, stride, ignore, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        # while all is -inf, -inf must not be subtracted from itself
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = higher
    log_sum = top + tl.log(total)
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < width)
    chosen = tl.load(logits + row * stride + tl.where(inside, label, 0)).to(tl.float32)
    loss = tl.where(inside, log_sum - chosen, float("nan"))  # an invalid label must not read outside of the row
    tl.store(losses + row, tl.where(label == ignore, 0.0, loss))
    tl.store(sums + row, log_sum)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(logits, labels, sums, upstream, grads, width, stride, ignore, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    label = tl.load(labels + row)
    x = tl.load(logits + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    slope = tl.exp(x - tl.load(sums + row)) - tl.where(columns == label, 1.0, 0.0)
    grad = tl.where(label == ignore, 0.0, slope * tl.load(upstream + row))
    tl.store(grads + row * width + columns, grad.to(grads.dtype.element_ty), mask=mask)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, labels_R: Tensor, ignore: int) -> Tensor:
        rows, width = logits_RV.shape
        losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
        sums_R = torch.empty_like(losses_R)
        if rows:
            args = (logits_RV, labels_R, losses_R, sums_R, width, logits_RV.stride(0), ignore)
            with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
                _forward[(rows,)](*args, BLOCK=_BLOCK, num_warps=8)
        ctx.save_for_backward(logits_RV, labels_R, sums_R)
        ctx.ignore = ignore
        return losses_R

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream_R: Tensor) -> tuple[Tensor, None, None]:
        logits_RV, labels_R, sums_R = ctx.saved_tensors
        rows, width = logits_RV.shape
        grads_RV = torch.empty(rows, width, dtype=logits_RV.dtype, device=logits_RV.device)
        if rows:
            args = (logits_RV, labels_R, sums_R, upstream_R.contiguous(), grads_RV, width, logits_RV.stride(0), ctx.ignore)
            with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
                _backward[(rows, triton.cdiv(width, _BLOCK))](*args, BLOCK=_BLOCK, num_warps=8)
        return grads_RV, None, None


def cross_entropy(logits_RV: Tensor, labels_R: Tensor, ignore: int = -100) -> Tensor:
    """The loss of each row, [R] in float32; 0 where the label is `ignore`, NaN where it is outside the vocabulary."""
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    losses: Tensor = _CrossEntropy.apply(logits_RV, labels_R.contiguous(), ignore)  # type: ignore[no-untyped-call]
    return losses
