"""The middle of a gated MLP, silu(gate) * up, in one launch; forward only.

R = rows, W = width; gate and up may lie side by side. Plain reference: `reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.overlap import early, let_next_begin, wait_for_last
from symbiosis.kernels.rounding import rounded

_BLOCK = 1024


def reference(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    return F.silu(gate_RW) * up_RW


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate, up, out, width, gate_stride, up_stride, EARLY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    let_next_begin(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    wait_for_last(EARLY)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = rounded(g / (1.0 + tl.exp(-g)), out.dtype.element_ty) * u
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


def gated(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    """Rows may lie at any distance, the numbers of a row next to each other."""
    rows, width = gate_RW.shape
    assert gate_RW.shape == up_RW.shape, (gate_RW.shape, up_RW.shape)
    assert gate_RW.stride(1) == up_RW.stride(1) == 1, (gate_RW.stride(), up_RW.stride())
    out = torch.empty(rows, width, dtype=gate_RW.dtype, device=gate_RW.device)
    if rows:
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _gated[(rows, triton.cdiv(width, _BLOCK))](
                gate_RW, up_RW, out, width, gate_RW.stride(0), up_RW.stride(0), BLOCK=_BLOCK, **early(out.device)
            )
    return out
