"""Captures passes of one model as CUDA graphs, which share memory and streams: one runs at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from symbiosis.gpu.cuda_graph import GraphPool

_MIN_FREE_SHARE = 1 / 64
"""Of the device's memory, which captures leave free."""


class PassCapture:
    """A memory pool, a stream to capture on and one for LoRA products. Without a GPU, a pass is its own graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = GraphPool(device)
        self._streams: tuple[Any, Any] | None = None  # one pair for all graphs: torch has few streams to hand out

    @property
    def side_stream(self) -> Any:
        """For LoRA products, which use the multiprocessors that base layers leave free; None without a GPU."""
        return self._stream_pair()[1] if self._device.type == "cuda" else None

    def has_memory(self) -> bool:
        """Whether the device has memory for another graph."""
        if self._device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(self._device)
        return free >= _MIN_FREE_SHARE * total

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that replays `compute` and returns its result, which the next replay overwrites.

        `compute` runs twice: before the capture, and in it.
        """
        if self._device.type != "cuda":
            return compute
        device = self._device
        stream: Any = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):  # the default stream cannot be captured
            self._stream_pair()[0].wait_stream(stream)
            stream = self._stream_pair()[0]
        with torch.cuda.stream(stream):
            try:
                compute()  # compiles kernels; libraries choose theirs
            finally:  # also after an error: launched kernels read memory that is freed next
                for each in (stream, self._stream_pair()[1]):
                    each.synchronize()
            graph, found = self._pool.capture(compute)
        torch.cuda.current_stream(device).wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay

    def _stream_pair(self) -> tuple[Any, Any]:
        """Both have a higher priority than co-located training."""
        if self._streams is None:
            low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
            make = functools.partial(torch.cuda.Stream, self._device)
            self._streams = make(priority=high), make(priority=min(low, high + 1))
        return self._streams
