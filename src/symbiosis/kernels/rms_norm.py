"""RMS norm of rows with its weight, in one launch; forward only.

R = rows, W = width. Models differ in where they round: most round the
normalised row before it is multiplied with the weight. Plain reference: `plain_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from symbiosis.kernels.overlap import early, let_next_begin, wait_for_last
from symbiosis.kernels.rounding import rounded

_WIDEST = 16384


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, width, stride, epsilon, EARLY: tl.constexpr, TWICE: tl.constexpr, WIDTH: tl.constexpr
):
    let_next_begin(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    value = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    if TWICE:
        value = rounded(value, out.dtype.element_ty)
    tl.store(out + row * width + column, (value * scale).to(out.dtype.element_ty), mask=mask)


def fits(x: Tensor, weight_W: Tensor) -> bool:
    """Whether the kernel takes these; nobody may ask for gradients."""
    wide = x.shape[-1]
    even = x.dim() >= 2 and x.stride(-1) == 1 and x.numel() > 0 and wide == weight_W.numel() <= _WIDEST
    return even and all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def rms_norm(x: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool) -> Tensor:
    """What `plain_norm` computes, of [..., W] in rows at even distances."""
    width = weight_W.numel()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _norm[(x.numel() // width,)](
            x, weight_W, out, width, x.stride(-2), epsilon, TWICE=twice, WIDTH=triton.next_power_of_2(width),
            num_warps=min(16, max(1, triton.next_power_of_2(width) // 512)), **early(x.device),
        )  # fmt: skip
    return out
