"""Was a tensor written to since? Its version counter tells, where it has one."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """None for tensors of inference mode, which count nothing."""
    return None if tensor.is_inference() else tensor._version
