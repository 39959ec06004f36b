"""Linear layers with a packed weight. Plain reference: `F.linear`.

`F.linear` packs the weight for every product. For 2 to 64 rows that takes a sixth to two thirds of its time, so a copy is
packed once: for a kernel of our own, or by oneDNN where the processor multiplies bfloat16 itself.

R = rows of a batch, I = inputs, O = outputs.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Protocol

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import panel_widths, symbol

_SPARE_ROWS = 7  # as in packed_linear.c
_BLAS_ROWS = 384
"""From so many float32 rows on, MKL on x86 is faster than our kernel: packing is then a small part of its time."""


class PackedWeight(Protocol):
    """A packed copy of a weight."""

    rows: range
    """For other numbers of rows `F.linear` is as fast or faster."""

    def linear(self, x_RI: Tensor) -> Tensor:
        """x w^T, plus the bias."""


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeight | None:
    """None if neither kernel supports this weight here."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight_OI.dtype is torch.bfloat16 and multiplies_bfloat16():
        return OneDnnWeight(weight_OI, bias_O)
    if panel_widths():
        return PanelWeight(weight_OI, bias_O)
    return OneDnnWeight(weight_OI, bias_O) if has_one_dnn(weight_OI.dtype) else None


def has_one_dnn(dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack weights of this dtype here."""
    has_it = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_it and (dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has instructions for products of bfloat16. On x86 it also converts, which is slower than our kernel."""
    if not has_one_dnn(torch.bfloat16):
        return False
    return platform.machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class _Args(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_stride", "panel", "is_half")] + [
        (name, ctypes.c_void_p) for name in ("x", "panels", "bias", "y", "blocks")
    ]


class PanelWeight:
    """Packed for the compiled kernel. Any number of threads."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, width: int | None = None) -> None:
        """`width`: one of `panel_widths()`, the first by default."""
        outputs, inputs = weight_OI.shape
        width = width or panel_widths()[0]
        padded = weight_OI.detach().new_zeros(-(-outputs // width) * width, inputs)
        padded[:outputs] = weight_OI.detach()
        self._panels = padded.view(-1, width, inputs).transpose(1, 2).contiguous()
        self._bias_O = None if bias_O is None else bias_O.detach().float().contiguous()
        self._inputs, self._outputs = inputs, outputs
        is_half = weight_OI.dtype is torch.bfloat16
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        self._args = bytes(_Args(0, inputs, outputs, 0, width, is_half, None, self._panels.data_ptr(), bias))
        self._kernel = symbol("packed_linear")
        has_fast_blas = torch._C.has_mkl and not is_half
        self.rows = range(1, _BLAS_ROWS if has_fast_blas else sys.maxsize)

    def linear(self, x_RI: Tensor) -> Tensor:
        rows, inputs = x_RI.shape
        assert (x_RI.dtype, inputs) == (self._panels.dtype, self._inputs), "the kernel does not check memory"
        y_RO = x_RI.new_empty(rows, self._outputs)
        x_RI = x_RI.float()
        x_RI = x_RI if x_RI.stride(1) == 1 else x_RI.contiguous()
        blocks = torch.empty((rows + _SPARE_ROWS) * inputs)
        args = _Args.from_buffer_copy(self._args)
        args.rows, args.x_stride = rows, x_RI.stride(0)
        args.x, args.y, args.blocks = x_RI.data_ptr(), y_RO.data_ptr(), blocks.data_ptr()
        self._kernel(ctypes.byref(args), torch.get_num_threads())
        return y_RO


class OneDnnWeight:
    """Packed by oneDNN."""

    rows = range(2, sys.maxsize)

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous())
        self._bias_O = None if bias_O is None else bias_O.detach()

    def linear(self, x_RI: Tensor) -> Tensor:
        y_RO: Tensor = torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias_O, "none", [], "")
        return y_RO
