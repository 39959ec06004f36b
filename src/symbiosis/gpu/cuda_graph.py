"""CUDA graphs: what is launched while one is captured is what it does when it is replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from symbiosis.gpu import driver

_Found = TypeVar("_Found")


def captured(compute: Callable[[], _Found], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Found]:
    """A graph on the current stream, with its memory from `pool`, and what `compute` returned.

    Whatever `compute` raises is raised; the pool may be unusable then.
    """
    with driver.capturing:  # executor, hosted engine and training have threads of their own, and there is one garbage collector
        collects = gc.isenabled()
        gc.disable()  # nothing on the GPU may be freed meanwhile
        try:
            return _captured(compute, pool)
        finally:
            if collects:
                gc.enable()


def _captured(compute: Callable[[], _Found], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Found]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        found = compute()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    return graph, found


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that failed. If that fails too, torch believes it captures for ever: no random numbers, pool's memory."""
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # later versions of torch have done both
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        spare = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            spare.capture_begin(capture_error_mode="thread_local")
            spare.capture_end()  # of nothing: that ends what the other could not
