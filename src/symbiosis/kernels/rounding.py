"""Rounding inside a kernel, where the model's own code rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 rounded to `kind` and back. By hand for bfloat16: the compiler removes such a conversion."""
    if kind == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, even.to(tl.float32, bitcast=True), x)  # noqa: PLR0124 - NaN stays NaN
    return x.to(kind).to(tl.float32)
