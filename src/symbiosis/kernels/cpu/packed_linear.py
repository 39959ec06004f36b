"""Linear layers with a packed weight. Plain reference: `F.linear`.

`F.linear` packs the weight for every product. For 2 to 64 rows that takes a sixth to two thirds of its time, so a copy is
packed once: for a kernel of our own on ARM, elsewhere by oneDNN. oneDNN's products on ARM are slower below 64 rows, keep the
number of threads of the first one, and need instructions for bfloat16.

R = rows of a batch, I = inputs, O = outputs.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import function, panel_width

_BLOCK_ROWS = 8  # as in packed_linear.c


class PackedWeight(Protocol):
    """A packed copy of a weight."""

    min_rows: int
    """With fewer rows `F.linear` is faster."""

    def linear(self, x_RI: Tensor) -> Tensor:
        """x w^T, plus the bias."""


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeight | None:
    """None if neither kernel supports this weight here."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype not in (torch.float32, torch.bfloat16):
        return None
    has_one_dnn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if weight_OI.dtype is torch.bfloat16:
        has_one_dnn = has_one_dnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if panel_width() and not (has_one_dnn and weight_OI.dtype is torch.bfloat16):
        return PanelWeight(weight_OI, bias_O)
    return OneDnnWeight(weight_OI, bias_O) if has_one_dnn else None


class _Args(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_stride")] + [
        (name, ctypes.c_void_p) for name in ("x", "panels", "bias", "y", "blocks")
    ]


class PanelWeight:
    """Packed for the compiled kernel. Any number of threads."""

    min_rows = 1

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        outputs, inputs = weight_OI.shape
        width = panel_width()
        padded = weight_OI.detach().new_zeros(-(-outputs // width) * width, inputs)
        padded[:outputs] = weight_OI.detach()
        self._panels = padded.view(-1, width, inputs).transpose(1, 2).contiguous()
        self._outputs = outputs
        self._bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        self._kernel = function("packed_linear", weight_OI.dtype)

    def linear(self, x_RI: Tensor) -> Tensor:
        rows, inputs = x_RI.shape
        assert (x_RI.dtype, inputs) == (self._panels.dtype, self._panels.shape[1]), "the kernel does not check memory"
        y_RO = x_RI.new_empty(rows, self._outputs)
        x_RI = x_RI.float()
        x_RI = x_RI if x_RI.stride(1) == 1 else x_RI.contiguous()
        blocks = torch.empty(-(-rows // _BLOCK_ROWS) * _BLOCK_ROWS * inputs)
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        pointers = x_RI.data_ptr(), self._panels.data_ptr(), bias, y_RO.data_ptr(), blocks.data_ptr()
        args = _Args(rows, inputs, self._outputs, x_RI.stride(0), *pointers)
        self._kernel(ctypes.byref(args), torch.get_num_threads())
        return y_RO


class OneDnnWeight:
    """Packed by oneDNN."""

    min_rows = 2

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())
        self._bias_O = None if bias_O is None else bias_O.detach()

    def linear(self, x_RI: Tensor) -> Tensor:
        y_RO: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias_O, "none", [], "")
        return y_RO
