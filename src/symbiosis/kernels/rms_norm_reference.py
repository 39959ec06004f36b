"""RMS norm by torch's own kernels: the reference of `rms_norm`, used without Triton or where the weight is trained."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm_reference(x: Tensor, weight_W: Tensor, epsilon: float, *, twice: bool) -> Tensor:
    """`twice`: rounded before the product with the weight, and again after it."""
    if twice:
        return F.rms_norm(x, weight_W.shape, None, epsilon) * weight_W
    return F.rms_norm(x, weight_W.shape, weight_W, epsilon)
