"""Low-rank changes of a few rows each by many adapters.

R = rows, I / O = input and output width, r = rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.kernels.cpu.library import function

_MOST_WORK = 1024  # rows of one adapter times its rank: the reference is as fast with more
_MOST_RANK = 512  # as in low_rank.c
_TILE_ROWS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """y[rows, columns] += x[rows] a b."""

    rows: slice
    columns: slice
    a_Ir: Tensor
    b_rO: Tensor


def reference(change: Change, x_RI: Tensor, y_RO: Tensor) -> None:
    """One change, in place."""
    y_RO[change.rows, change.columns].addmm_(x_RI[change.rows] @ change.a_Ir, change.b_rO)


def fits(change: Change) -> bool:
    """Whether the kernel does this."""
    a_Ir, b_rO = change.a_Ir, change.b_rO
    return (
        (change.rows.stop - change.rows.start) * a_Ir.shape[1] <= _MOST_WORK
        and a_Ir.shape[1] <= _MOST_RANK
        and a_Ir.device.type == "cpu"
        and a_Ir.dtype is b_rO.dtype
        and a_Ir.is_contiguous()
        and b_rO.is_contiguous()
        and function("low_rank", a_Ir.dtype) is not None
    )


class _Tile(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("row", "rows", "column", "width", "rank")] + [
        (name, ctypes.c_void_p) for name in ("a", "b")
    ]


class Changes:
    """Changes of the same layers that fit, for passes of the same rows."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes  # the kernel knows only where their weights lie
        tiles = [
            _Tile(
                row,
                min(_TILE_ROWS, change.rows.stop - row),
                change.columns.start,
                change.b_rO.shape[1],
                change.b_rO.shape[0],
                change.a_Ir.data_ptr(),
                change.b_rO.data_ptr(),
            )
            for change in changes
            for row in range(change.rows.start, change.rows.stop, _TILE_ROWS)
        ]
        self._tiles, self._count = (_Tile * len(tiles))(*tiles), ctypes.c_int64(len(tiles))
        self._dtype, self._width = changes[0].a_Ir.dtype, changes[0].a_Ir.shape[0]
        self._kernel = function("low_rank", self._dtype)
        self._most_rows = max(change.rows.stop for change in changes)
        self._most_columns = max(change.columns.start + change.b_rO.shape[1] for change in changes)

    def add(self, x_RI: Tensor, y_RO: Tensor) -> None:
        """All of them, in place."""
        assert (x_RI.dtype, x_RI.shape[1], x_RI.stride(1)) == (self._dtype, self._width, 1)
        assert (y_RO.dtype, y_RO.stride(1)) == (self._dtype, 1)
        assert y_RO.shape[1] >= self._most_columns
        assert min(x_RI.shape[0], y_RO.shape[0]) >= self._most_rows
        self._kernel(
            self._tiles,
            self._count,
            ctypes.c_void_p(x_RI.data_ptr()),
            ctypes.c_int64(x_RI.stride(0)),
            ctypes.c_int64(self._width),
            ctypes.c_void_p(y_RO.data_ptr()),
            ctypes.c_int64(y_RO.stride(0)),
            torch.get_num_threads(),
        )
