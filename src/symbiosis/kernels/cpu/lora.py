"""Low-rank changes of a few rows each by many adapters.

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

_MOST_WORK = 1024  # rows of one adapter times its rank: the reference is as fast with more
_MOST_RANK = 512  # as in low_rank.c
_TILE_ROWS = 4


def reference(x_RI: Tensor, y_RO: Tensor, rows: slice, columns: slice, a_rI: Tensor, b_Or: Tensor) -> None:
    """One change, in place."""
    y_RO[rows, columns].addmm_(x_RI[rows] @ a_rI.T, b_Or.T)


@dataclass(frozen=True, slots=True)
class LoraRow:
    """What the kernel knows of an adapter's change of a layer: where its weights lie, which others must keep there."""

    dtype: torch.dtype
    rank: int
    a: int
    b: int

    @staticmethod
    def of(a_rI: Tensor, b_Or: Tensor) -> LoraRow | None:
        """None if the kernel cannot compute it."""
        rank = a_rI.shape[0]
        if not (a_rI.is_cpu and b_Or.is_cpu and a_rI.dtype is b_Or.dtype and rank <= _MOST_RANK):
            return None
        if function("low_rank", a_rI.dtype) is None or not (a_rI.T.is_contiguous() and b_Or.T.is_contiguous()):
            return None
        return LoraRow(a_rI.dtype, rank, a_rI.data_ptr(), b_Or.data_ptr())

    def is_for(self, rows: int) -> bool:
        """Whether the kernel is the faster way for so many rows."""
        return rows * self.rank <= _MOST_WORK


class LoraBatchCpu:
    """Changes of layers that read the same rows, for passes of the same rows; no two of the same part of the result."""

    def __init__(self, changes: Sequence[tuple[slice, slice, LoraRow]], width: int) -> None:
        """Rows and columns of the result, and what changes them. `width` of the input."""
        tiles = array("q")  # as in low_rank.c
        for rows, columns, line in changes:
            for row in range(rows.start, rows.stop, _TILE_ROWS):
                count = min(_TILE_ROWS, rows.stop - row)
                tiles.extend((row, count, columns.start, columns.stop - columns.start, line.rank, line.a, line.b))
        self._tiles, self._count, self._width = tiles, len(tiles) // 7, width
        (self._dtype,) = {line.dtype for _, _, line in changes}
        self._kernel = function("low_rank", self._dtype)
        self._most_rows = max(rows.stop for rows, _, _ in changes)
        self._most_columns = max(columns.stop for _, columns, _ in changes)

    def add(self, x_RI: Tensor, y_RO: Tensor) -> None:
        """All of them, in place."""
        assert (x_RI.dtype, x_RI.shape[1], x_RI.stride(1)) == (self._dtype, self._width, 1)
        assert (y_RO.dtype, y_RO.stride(1)) == (self._dtype, 1)
        assert y_RO.shape[1] >= self._most_columns
        assert min(x_RI.shape[0], y_RO.shape[0]) >= self._most_rows
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
