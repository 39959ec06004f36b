"""Launches that Triton has prepared before: what it finds out anew for each takes several times as long as the launch.

A tenant's own part makes some 200 launches a step, between two of which its GPU
waits. Plain reference: launching the kernel itself, which is what happens the
first time for arguments of each kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: all that the compiler wants to know of a pointer
_REMEMBER = 4096  # kinds of arguments, by kernel


class Launcher:
    """Of one kernel. Numbers are of one kind only if they are equal: the compiler may look at anything of them.

    In one place stand numbers of one type only, whole ones, fractions or truths.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], like: Tensor, *arguments: Any, warps: int = 4, early: bool = False) -> None:
        """On the device of `like`; all arguments in their order, what is constant to the kernel too. `early`: see `overlap`."""
        index = like.get_device()
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, like, *arguments, warps=warps, early=early)
        kind = (
            index,
            warps,
            early,
            *[(a.dtype, a.data_ptr() % _ALIGNMENT) if isinstance(a, Tensor) else a for a in arguments],
        )
        made = self._made.get(kind)
        if made is not None:
            made[grid](*arguments)
            return None
        made = self._kernel[grid](*arguments, num_warps=warps, **({"launch_pdl": True} if early else {}))
        if made is not None:  # it is compiled; an interpreter has nothing to keep
            if len(self._made) >= _REMEMBER:
                self._made.clear()
            self._made[kind] = made
        return None
