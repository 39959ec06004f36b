"""CUDA graphs: what is launched while one is captured is what it does when it is replayed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

_Found = TypeVar("_Found")
_one_at_a_time = threading.Lock()  # executor and hosted engine have threads of their own, and there is one garbage collector


def captured(compute: Callable[[], _Found], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Found]:
    """A graph on the current stream, with its memory from `pool`, and what `compute` returned."""
    graph = torch.cuda.CUDAGraph()
    with _one_at_a_time:
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


@contextmanager
def done_on(device: torch.device) -> Iterator[None]:
    """All that was launched there is done, and nobody captures in here: that would fail, or make their graph fail."""
    with _one_at_a_time:
        torch.cuda.synchronize(device)
        yield
