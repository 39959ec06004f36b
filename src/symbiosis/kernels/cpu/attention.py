"""Decode attention over the blocks of the KV cache. Plain reference: `serving.model.paged_attention`, which gathers blocks.

R = rows of a batch, B = those of decoding sequences, P = blocks of the longest sequence, H = query heads, K = key heads,
D = width of a head, S = slots of the KV cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import function

_MAX_WIDTH = 256  # as in attention.c
_LANES = 8  # of the widest vectors, on x86-64


def fits(q_RHD: Tensor, keys_SKD: Tensor) -> bool:
    """Whether the kernel supports these."""
    width = keys_SKD.shape[2]
    return (
        q_RHD.shape[2] == width
        and width <= _MAX_WIDTH
        and width % _LANES == 0
        and q_RHD.dtype is keys_SKD.dtype
        and q_RHD.device.type == "cpu"
        and q_RHD.stride(2) == 1
        and keys_SKD.is_contiguous()
        and function("attention", q_RHD.dtype) is not None
    )


class _Args(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_int64)
            for name in ("sequences", "heads", "key_heads", "width", "block_size", "max_blocks", "window", "q_row", "q_head")
        ]
        + [(name, ctypes.c_void_p) for name in ("rows", "positions", "blocks", "q", "keys", "values", "out")]
        + [(name, ctypes.c_float) for name in ("scale", "cap")]
    )


class DecodeAttention:
    """Decode rows and the block tables of their sequences, for all layers of a batch."""

    def __init__(self, rows_B: Tensor, positions_B: Tensor, block_table_BP: Tensor, block_size: int) -> None:
        """Positions count from 0. A row's own key must be stored before it attends."""
        self._tensors = rows_B, positions_B, block_table_BP.contiguous()  # the kernel holds only their addresses
        assert all(tensor.dtype is torch.int64 for tensor in self._tensors)
        self._count, self._max_blocks, self._block_size = len(rows_B), block_table_BP.shape[1], block_size

    def attend(
        self, q_RHD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """The attention of each row, [B, H, D]."""
        _, heads, width = q_RHD.shape
        out_BHD = q_RHD.new_empty(self._count, heads, width)
        args = _Args(
            self._count,
            heads,
            keys_SKD.shape[1],
            width,
            self._block_size,
            self._max_blocks,
            window or 0,
            q_RHD.stride(0),
            q_RHD.stride(1),
            *[tensor.data_ptr() for tensor in (*self._tensors, q_RHD, keys_SKD, values_SKD, out_BHD)],
            scale,
            cap or 0.0,
        )
        function("attention", q_RHD.dtype)(ctypes.byref(args), torch.get_num_threads())
        return out_BHD
