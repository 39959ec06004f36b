"""int8 numbers with a scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX = 127


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] as int8, and the scale of each last row in float32. NaN and infinity stay NaN, through the scale."""
    scales = numbers.float().abs().amax(-1) / _MAX
    safe = torch.where(scales > 0, scales, 1.0)
    rounded = (numbers.float() / safe[..., None]).round()
    return rounded.nan_to_num(0.0).clamp(-_MAX, _MAX).to(torch.int8), torch.where(scales.isfinite(), scales, torch.nan)


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.float() * scales[..., None]).to(dtype)
