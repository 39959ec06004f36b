"""Linear layers with a packed weight. Plain reference: `F.linear`.

`F.linear` packs the weight for every product. For 2 to 64 rows that takes a tenth to a half of its time, so a copy is packed
once, by oneDNN.

R = rows of a batch, I = inputs, O = outputs.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

_MIN_ROWS = 2
"""For one row `F.linear` reads the weight as it is."""
_IS_ARM = platform.machine() in ("aarch64", "arm64")


class PackedLinear:
    """The product with one weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Keeps a packed copy of the weight."""
        # On ARM, oneDNN keeps the number of threads of its first product.
        self._threads = torch.get_num_threads() if _IS_ARM else None
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())
        self._bias_O = None if bias_O is None else bias_O.detach()

    def is_faster(self, rows: int) -> bool:
        """Whether it is faster than `F.linear`."""
        return rows >= _MIN_ROWS and self._threads in (None, torch.get_num_threads())

    def __call__(self, x_RI: Tensor) -> Tensor:
        y_RO: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias_O, "none", [], "")
        return y_RO


def can_pack(weight_OI: Tensor) -> bool:
    """Whether the processor and this build of torch pack such weights."""
    if weight_OI.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight_OI.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype is torch.float32
