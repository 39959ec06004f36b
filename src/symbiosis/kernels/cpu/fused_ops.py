"""Ops of a decoder layer between its products, for a few rows in float32, each with its plain reference.

R = rows, D = width of the model, A = heads, H = query heads, K = key heads, W = width of a head,
I = width of an MLP, S = slots of the KV cache.
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


def residual_norm(x_RD: Tensor, delta_RD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """x += delta, in place; the RMS norm of the sum, with its weight."""
    kernel = _kernel("residual_norm", x_RD, delta_RD, weight_D)
    if kernel is None or not delta_RD.is_contiguous():
        return residual_norm_reference(x_RD, delta_RD, weight_D, epsilon)
    out_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    arguments = _int64(x_RD.shape[1]), _pointer(delta_RD), _pointer(weight_D), ctypes.c_float(epsilon), _pointer(out_RD)
    kernel(*_rows(x_RD), *arguments, torch.get_num_threads())
    return out_RD


def residual_norm_reference(x_RD: Tensor, delta_RD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    return rms_norm_reference(x_RD.add_(delta_RD), weight_D, epsilon)


def rope_and_store(
    qkv_RAW: Tensor, embeddings: tuple[Tensor, Tensor], slots_R: Tensor, keys_SKW: Tensor, values_SKW: Tensor
) -> Tensor:
    """Rotary positions of queries and keys. Keys and values are stored in these slots; the queries are returned.

    `embeddings` are cosines and sines, [R, W].
    """
    rows, heads, width = qkv_RAW.shape
    num_keys = keys_SKW.shape[1]
    kernel = _kernel("rope_and_store", qkv_RAW, *embeddings, keys_SKW, values_SKW)
    is_contiguous = all(each.is_contiguous() for each in (*embeddings, keys_SKW, values_SKW, slots_R))
    if kernel is None or qkv_RAW.stride(1) != width or not is_contiguous or slots_R.dtype is not torch.int64:
        return rope_and_store_reference(qkv_RAW, embeddings, slots_R, keys_SKW, values_SKW)
    q_RHW = qkv_RAW.new_empty(rows, heads - 2 * num_keys, width)
    sizes = _int64(q_RHW.shape[1]), _int64(num_keys), _int64(width)
    pointers = (_pointer(each) for each in (*embeddings, slots_R, keys_SKW, values_SKW, q_RHW))
    kernel(*_rows(qkv_RAW), *sizes, *pointers, torch.get_num_threads())
    return q_RHW


def rope_and_store_reference(
    qkv_RAW: Tensor, embeddings: tuple[Tensor, Tensor], slots_R: Tensor, keys_SKW: Tensor, values_SKW: Tensor
) -> Tensor:
    num_keys = keys_SKW.shape[1]
    q_RHW, k_RKW, v_RKW = torch.split(qkv_RAW, [qkv_RAW.shape[1] - 2 * num_keys, num_keys, num_keys], 1)
    keys_SKW.index_copy_(0, slots_R, rotary_reference(k_RKW, *embeddings).to(keys_SKW.dtype))
    values_SKW.index_copy_(0, slots_R, v_RKW.to(values_SKW.dtype))
    return rotary_reference(q_RHW, *embeddings)


def rotary_reference(x_RAW: Tensor, cos_RW: Tensor, sin_RW: Tensor) -> Tensor:
    """Rotary positions of all heads."""
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
