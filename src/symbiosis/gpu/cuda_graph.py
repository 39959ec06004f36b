"""Capture of CUDA graphs: a replay launches the kernels that were launched during the capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from symbiosis.gpu import driver

_Result = TypeVar("_Result")


def capture(compute: Callable[[], _Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """A graph on the current stream, with its memory from `pool`, and the result of `compute`.

    Raises what `compute` raises; the pool may be unusable then.
    """
    with driver.capture_lock:  # executor, engine and training capture on threads of their own; the garbage collector is shared
        is_collecting = gc.isenabled()
        gc.disable()  # GPU memory must not be freed during a capture
        try:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
                graph.capture_end()
            except BaseException:
                _abort(graph, pool)
                raise
        finally:
            if is_collecting:
                gc.enable()
    return graph, result


def _abort(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a failed capture. Without it torch stays in capture mode: no random numbers, allocations from the pool."""
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # later versions of torch have done both
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        empty = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()  # an empty capture ends the capture mode that the failed one left


class GraphPool:
    """Memory for graphs of which one runs at a time. A failed capture may leave it unusable: the next one gets new memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None
        """torch frees a pool with its last graph. This one keeps the pool between captures."""

    def capture(self, compute: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """See `capture`."""
        try:
            if self._anchor is None:
                self._handle, spare = torch.cuda.graph_pool_handle(), torch.zeros(8, device=self._device)
                self._anchor, _ = capture(lambda: spare.add_(1.0), self._handle)
            return capture(compute, self._handle)
        except BaseException:
            self._anchor = None
            raise
