"""LoRA deltas of many adapters with a few rows each.

R = rows, I / O = input and output width, r = rank.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import function

_MAX_WORK = 1024  # rows of one adapter times its rank: above it the reference is as fast
_MAX_RANK = 512  # as in lora.c
_TILE_ROWS = 4


def reference(x_RI: Tensor, y_RO: Tensor, rows: slice, columns: slice, a_rI: Tensor, b_Or: Tensor) -> None:
    """Add one delta in place."""
    y_RO[rows, columns].addmm_(x_RI[rows] @ a_rI.T, b_Or.T)


@dataclass(frozen=True, slots=True)
class LoraRow:
    """Addresses of an adapter's weights for a layer. The caller must keep the tensors alive."""

    dtype: torch.dtype
    rank: int
    a: int
    b: int

    @staticmethod
    def of(a_rI: Tensor, b_Or: Tensor) -> LoraRow | None:
        """None if the kernel does not support these."""
        rank = a_rI.shape[0]
        if not (a_rI.is_cpu and b_Or.is_cpu and a_rI.dtype is b_Or.dtype and rank <= _MAX_RANK):
            return None
        if function("lora", a_rI.dtype) is None or not (a_rI.T.is_contiguous() and b_Or.T.is_contiguous()):
            return None
        return LoraRow(a_rI.dtype, rank, a_rI.data_ptr(), b_Or.data_ptr())

    def is_for(self, rows: int) -> bool:
        """Whether the kernel is faster than the reference for so many rows."""
        return rows * self.rank <= _MAX_WORK


class LoraBatchCpu:
    """Deltas of layers that read the same rows. No two of them may overlap in the output."""

    def __init__(self, deltas: Sequence[tuple[slice, slice, LoraRow]], width: int) -> None:
        """Rows and columns of the output, and the weights. `width`: of the input."""
        tiles = array("q")  # as in lora.c
        for rows, columns, weights in deltas:
            for row in range(rows.start, rows.stop, _TILE_ROWS):
                count = min(_TILE_ROWS, rows.stop - row)
                tiles.extend((row, count, columns.start, columns.stop - columns.start, weights.rank, weights.a, weights.b))
        self._tiles, self._count, self._width = tiles, len(tiles) // 7, width
        (self._dtype,) = {weights.dtype for _, _, weights in deltas}
        self._kernel = function("lora", self._dtype)
        self._max_row = max(rows.stop for rows, _, _ in deltas)
        self._max_column = max(columns.stop for _, columns, _ in deltas)

    def add(self, x_RI: Tensor, y_RO: Tensor) -> None:
        """Add all deltas in place."""
        assert (x_RI.dtype, x_RI.shape[1], x_RI.stride(1)) == (self._dtype, self._width, 1)
        assert (y_RO.dtype, y_RO.stride(1)) == (self._dtype, 1)
        assert y_RO.shape[1] >= self._max_column
        assert min(x_RI.shape[0], y_RO.shape[0]) >= self._max_row
        self._kernel(
            ctypes.c_void_p(self._tiles.buffer_info()[0]),
            ctypes.c_int64(self._count),
            ctypes.c_void_p(x_RI.data_ptr()),
            ctypes.c_int64(x_RI.stride(0)),
            ctypes.c_int64(self._width),
            ctypes.c_void_p(y_RO.data_ptr()),
            ctypes.c_int64(y_RO.stride(0)),
            torch.get_num_threads(),
        )
