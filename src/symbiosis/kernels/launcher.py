"""Cached kernel launches: what Triton works out anew for each launch takes several times as long as the launch itself.

A client's own part makes some 200 launches a step, between which its GPU is idle. `benchmarks.kernel_launch` measures
the difference. Plain reference: Triton's own launch, which also runs for the first arguments of each signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CACHE_SIZE = 4096  # signatures, by kernel
_ALIGNMENT = 16  # bytes: all that the compiler specialises on for a pointer


class Launcher:
    """Launches one kernel. Numbers are part of the signature: the compiler may specialise on their values.

    An argument has one type in all launches: int, float or bool. `Launcher.__call__ = Launcher.launch_uncached` turns the
    cache off for all kernels.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], like: Tensor, *arguments: Any, warps: int = 4, pdl: bool = False) -> None:
        """Launch on the device of `like`, with all arguments by position, constants too. `pdl`: see `programmatic_launch`."""
        index = like.get_device()
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(grid, like, *arguments, warps=warps, pdl=pdl)
        signature = (
            index,
            warps,
            pdl,
            *[(a.dtype, a.data_ptr() % _ALIGNMENT) if isinstance(a, Tensor) else a for a in arguments],
        )
        compiled = self._compiled.get(signature)
        if compiled is not None:
            compiled[grid](*arguments)
            return None
        compiled = self.launch_uncached(grid, like, *arguments, warps=warps, pdl=pdl)
        if compiled is not None:  # None: Triton's interpreter compiles nothing
            if len(self._compiled) >= _CACHE_SIZE:
                self._compiled.clear()
            self._compiled[signature] = compiled
        return None

    def launch_uncached(
        self, grid: tuple[int, int, int], like: Tensor, *arguments: Any, warps: int = 4, pdl: bool = False
    ) -> Any:
        """Triton's own launch. Returns the compiled kernel."""
        with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]
            return self._kernel[grid](*arguments, num_warps=warps, **({"launch_pdl": True} if pdl else {}))
