"""The weight norm of DoRA. I / O = input and output width, r = rank."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ROWS = 1024  # the whole of W in float32 may not fit


def dora_norm(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor, scaling: float) -> Tensor:
    """‖W + scaling · B A‖ of each row, [O], in the dtype of B."""
    chunks = zip(torch.split(weight_OI, _CHUNK_ROWS), torch.split(b_Or, _CHUNK_ROWS), strict=True)
    return torch.cat([torch.linalg.norm(w.to(b.dtype) + scaling * (b @ a_rI), dim=1) for w, b in chunks])
