"""CUDA graphs: what is launched while one is captured is what it does when it is replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from symbiosis.links import driver

_Found = TypeVar("_Found")


def captured(compute: Callable[[], _Found], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Found]:
    """A graph on the current stream, with its memory from `pool`, and what `compute` returned."""
    graph = torch.cuda.CUDAGraph()
    with driver.capturing:  # executor, hosted engine and training have threads of their own, and there is one garbage collector
        collects = gc.isenabled()
        gc.disable()  # nothing on the GPU may be freed meanwhile
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                found = compute()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
    return graph, found
