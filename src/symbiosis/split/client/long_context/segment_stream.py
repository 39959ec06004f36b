"""Segments of the KV cache on their way between host memory and a GPU, while the GPU computes.

Keys and values of a prefill chunk go to host memory on one stream. Segments of earlier chunks come on another one, into two
buffers in turns: the next segment, of this layer or of the next one, is copied while the current one is attended to. GPU
memory is two segments, whatever the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BUFFERS = 2


@dataclass(slots=True)
class _Segment:
    key: tuple[int, int, int]
    """Layer, first token, token after the last."""
    tensors: list[Tensor]
    buffer: int
    is_ready: Any


@dataclass(slots=True)
class _Buffer:
    memory: Tensor | None = None
    """Bytes on the GPU."""
    is_free: Any = None
    """Recorded when the last reader was launched."""


@dataclass(slots=True, eq=False)
class SegmentStream:
    """Copies of one cache on one GPU."""

    device: torch.device
    _outward: Any = None
    _inward: Any = None
    _stored: dict[int, Any] = field(default_factory=dict)
    """By layer: recorded after its last copy to the host."""
    _buffers: list[_Buffer] = field(default_factory=lambda: [_Buffer() for _ in range(BUFFERS)])
    _plan: deque[tuple[tuple[int, int, int], list[Tensor]]] = field(default_factory=deque)
    _coming: deque[_Segment] = field(default_factory=deque)
    _free: deque[int] = field(default_factory=lambda: deque(range(BUFFERS)))
    _reading: int = -1

    def __post_init__(self) -> None:
        self._outward, self._inward = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]

    def store(self, layer: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (GPU tensor, place in host memory); equal shapes [B, K, T, …], tokens contiguous. Returns at once."""
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            for source, place in pairs:
                source.record_stream(self._outward)
                _copy_heads(source, place)
            self._stored[layer] = self._outward.record_event()

    def plan(self, segments: Iterable[tuple[tuple[int, int, int], list[Tensor]]]) -> None:
        """Announce the segments that will be read, in order, each with its tensors in host memory."""
        self._drop_coming()
        self._plan = deque(segments)
        self._start_copies()

    def fetch(self, key: tuple[int, int, int], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors on the GPU, until the next `fetch`. They come early if they are the next of the plan."""
        if not self._coming or self._coming[0].key != key:
            self._drop_coming()
            self._plan.clear()
            self._start_copy(key, tensors)
        segment = self._coming.popleft()
        torch.cuda.current_stream(self.device).wait_event(segment.is_ready)
        self._reading = segment.buffer
        return segment.tensors

    def release(self) -> None:
        """The tensors of the last `fetch` are read by launched kernels only: their buffer can be filled again."""
        self._buffers[self._reading].is_free = torch.cuda.current_stream(self.device).record_event()
        self._free.append(self._reading)
        self._start_copies()

    def finish(self) -> None:
        """Wait until all is in host memory, and free the GPU's."""
        self._drop_coming()
        self._plan.clear()
        self._outward.synchronize()
        self._inward.synchronize()
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self._stored.clear()

    def _drop_coming(self) -> None:
        while self._coming:
            self._free.append(self._coming.popleft().buffer)

    def _start_copies(self) -> None:
        while self._plan and self._free:
            self._start_copy(*self._plan.popleft())

    def _start_copy(self, key: tuple[int, int, int], tensors: list[Tensor]) -> None:
        number = self._free.popleft()
        buffer = self._buffers[number]
        sizes = [-(-tensor.nbytes // 256) * 256 for tensor in tensors]
        if buffer.memory is None or buffer.memory.numel() < sum(sizes):
            buffer.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            buffer.is_free = torch.cuda.current_stream(self.device).record_event()
        if buffer.is_free is not None:
            self._inward.wait_event(buffer.is_free)
        if (stored := self._stored.get(key[0])) is not None:
            self._inward.wait_event(stored)
        places, offset = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            part = buffer.memory[offset : offset + tensor.nbytes]
            places.append(part.view(tensor.dtype).view(tensor.shape))
            offset += size
        with torch.cuda.stream(self._inward):
            for tensor, place in zip(tensors, places, strict=True):
                _copy_heads(tensor, place)
            self._coming.append(_Segment(key, places, number, self._inward.record_event()))


def _copy_heads(source: Tensor, place: Tensor) -> None:
    """Head by head: a copy between devices is asynchronous only if both sides are contiguous."""
    if source.is_contiguous() and place.is_contiguous():
        place.copy_(source, non_blocking=True)
        return
    for sequence in range(source.shape[0]):
        for head in range(source.shape[1]):
            place[sequence, head].copy_(source[sequence, head], non_blocking=True)
