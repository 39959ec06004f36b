"""Attention of single rows over pages of keys and values. Plain reference: `engine.attention`, which gathers the pages.

R = rows of a pass, B = those of them that are single, P = pages of the longest sequence, H = query heads, K = key heads,
D = width of a head.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import function

_MOST_WIDTH = 256  # as in attention.c
_LANES = 8  # of the widest vectors there are, those of x86-64


def fits(q_RHD: Tensor, keys_SKD: Tensor) -> bool:
    """Whether the kernel does this."""
    width = keys_SKD.shape[2]
    return (
        q_RHD.shape[2] == width
        and width <= _MOST_WIDTH
        and width % _LANES == 0
        and q_RHD.dtype is keys_SKD.dtype
        and q_RHD.device.type == "cpu"
        and q_RHD.stride(2) == 1
        and keys_SKD.is_contiguous()
        and function("attention", q_RHD.dtype) is not None
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_int64)
            for name in ("spans", "heads", "key_heads", "width", "page_size", "most_pages", "window", "q_row", "q_head")
        ]
        + [(name, ctypes.c_void_p) for name in ("rows", "places", "pages", "q", "keys", "values", "out")]
        + [(name, ctypes.c_float) for name in ("scale", "cap")]
    )


class DecodeAttention:
    """Single rows and where their sequences lie, for all layers of a pass."""

    def __init__(self, rows_B: Tensor, places_B: Tensor, pages_BP: Tensor, page_size: int) -> None:
        """Of each row its place in its sequence, from 0; its own key is in its page when it attends."""
        self._tensors = rows_B, places_B, pages_BP.contiguous()  # the kernel knows only where they lie
        assert all(tensor.dtype is torch.int64 for tensor in self._tensors)
        self._count, self._most_pages, self._page_size = len(rows_B), pages_BP.shape[1], page_size

    def attend(
        self, q_RHD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """What each reads, [B, H, D]."""
        _, heads, width = q_RHD.shape
        found_BHD = q_RHD.new_empty(self._count, heads, width)
        now = _Attention(
            self._count,
            heads,
            keys_SKD.shape[1],
            width,
            self._page_size,
            self._most_pages,
            window or 0,
            q_RHD.stride(0),
            q_RHD.stride(1),
            *[tensor.data_ptr() for tensor in (*self._tensors, q_RHD, keys_SKD, values_SKD, found_BHD)],
            scale,
            cap or 0.0,
        )
        function("attention", q_RHD.dtype)(ctypes.byref(now), torch.get_num_threads())
        return found_BHD
