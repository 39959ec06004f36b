"""Version counters of tensors, which count writes."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """None for inference tensors, which have no counter."""
    return None if tensor.is_inference() else tensor._version
