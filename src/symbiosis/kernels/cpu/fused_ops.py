"""Ops of a decoder layer between its products, for a few rows in float32, each with its plain reference.

R = rows, D = width of the model, A = heads, W = width of a head, I = width of an MLP.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.kernels.cpu.library import function


def rms_norm(x_RD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMS norm with its weight."""
    kernel = _kernel("rms_norm", x_RD, weight_D)
    if kernel is None:
        return rms_norm_reference(x_RD, weight_D, epsilon)
    out_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    arguments = _int64(x_RD.shape[1]), _pointer(weight_D), ctypes.c_float(epsilon), _pointer(out_RD)
    kernel(*_rows(x_RD), *arguments, torch.get_num_threads())
    return out_RD


def rms_norm_reference(x_RD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x_RD, weight_D.shape, weight_D, epsilon)


def rotary(x_RAW: Tensor, cos_RW: Tensor, sin_RW: Tensor) -> Tensor:
    """Rotary positions of all heads."""
    kernel = _kernel("rotary", x_RAW, cos_RW, sin_RW)
    rows, heads, width = x_RAW.shape
    if kernel is None or x_RAW.stride(1) != width or not (cos_RW.is_contiguous() and sin_RW.is_contiguous()):
        return rotary_reference(x_RAW, cos_RW, sin_RW)
    out_RAW = x_RAW.new_empty(rows, heads, width)
    angles = _pointer(cos_RW), _pointer(sin_RW)
    kernel(*_rows(x_RAW), _int64(heads), _int64(width), *angles, _pointer(out_RAW), torch.get_num_threads())
    return out_RAW


def rotary_reference(x_RAW: Tensor, cos_RW: Tensor, sin_RW: Tensor) -> Tensor:
    first, second = x_RAW.chunk(2, dim=-1)
    return x_RAW * cos_RW[:, None] + torch.cat((-second, first), dim=-1) * sin_RW[:, None]


def silu_mul(gate_up_RI: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second half."""
    kernel = _kernel("silu_mul", gate_up_RI)
    if kernel is None:
        return silu_mul_reference(gate_up_RI)
    rows, width = gate_up_RI.shape[0], gate_up_RI.shape[1] // 2
    out_RI = gate_up_RI.new_empty(rows, width)
    kernel(*_rows(gate_up_RI), _int64(width), _pointer(out_RI), torch.get_num_threads())
    return out_RI


def silu_mul_reference(gate_up_RI: Tensor) -> Tensor:
    gate_RI, up_RI = gate_up_RI.chunk(2, dim=1)
    return F.silu(gate_RI) * up_RI


def _kernel(name: str, *tensors: Tensor) -> Any:
    fits = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1 for tensor in tensors)
    return function(name, torch.float32) if fits else None


def _rows(x: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]:
    return _pointer(x), _int64(x.shape[0]), _int64(x.stride(0))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


_int64 = ctypes.c_int64
