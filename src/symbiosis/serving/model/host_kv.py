"""The memory of host blocks, and the copies between it and the paged KV cache.

On a GPU, blocks that leave are gathered on the compute stream and copied to host memory on another stream, while the GPU
computes. Blocks that return are copied in stream order. The host waits for neither.

L = layers, N = blocks, S = tokens of a block, K = key heads, D = width of a head.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from symbiosis.gpu.host_memory import HostMemory
from symbiosis.serving.scheduling.host_blocks import BlockTransfer

_PIECE_BLOCKS = 16  # copied together
_MAX_PIECES = 4  # in flight: they hold device memory
_PROBED_BLOCKS = 8
_ADVICE = "lower host_cache_bytes (--host-cache-gb)"


class HostKV:
    """`num_blocks` blocks in host memory for a KV cache [L, 2, N, S, K, D]."""

    def __init__(self, num_blocks: int, kv_cache_L2NSKD: Tensor) -> None:
        """Raises `OutOfHostMemory`."""
        layers, two, _, *block = kv_cache_L2NSKD.shape
        self._device_L2NSKD = kv_cache_L2NSKD
        self._is_cuda = kv_cache_L2NSKD.is_cuda
        shape = (num_blocks, layers, two, *block)
        self._memory = HostMemory(shape, kv_cache_L2NSKD.dtype, pinned=self._is_cuda, advice=_ADVICE)
        self._host_NL2SKD = self._memory.tensor
        self._outward: Any = torch.cuda.Stream(kv_cache_L2NSKD.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._in_flight: deque[Any] = deque()

    @property
    def nbytes(self) -> int:
        return self._host_NL2SKD.nbytes

    def store(self, blocks: list[BlockTransfer]) -> None:
        """Copy device blocks to host blocks. The device blocks can be written as soon as this returns."""
        for piece in _pieces(blocks):
            staged_NL2SKD = self._device_L2NSKD[:, :, self._numbers([source for source, _ in piece])].movedim(2, 0).contiguous()
            if not self._is_cuda:
                self._copy_out(staged_NL2SKD, piece)
                continue
            while len(self._in_flight) >= _MAX_PIECES:
                self._in_flight.popleft().synchronize()
            self._outward.wait_stream(torch.cuda.current_stream(staged_NL2SKD.device))
            with torch.cuda.stream(self._outward):
                self._copy_out(staged_NL2SKD, piece)
                staged_NL2SKD.record_stream(self._outward)
                self._in_flight.append(self._outward.record_event())

    def restore(self, blocks: list[BlockTransfer]) -> None:
        """Copy host blocks to device blocks."""
        if self._is_cuda and blocks:
            torch.cuda.current_stream(self._device_L2NSKD.device).wait_stream(self._outward)
        for piece in _pieces(blocks):
            shape = (len(piece), *self._host_NL2SKD.shape[1:])
            staged_NL2SKD = torch.empty(shape, dtype=self._host_NL2SKD.dtype, device=self._device_L2NSKD.device)
            for place, (source, _) in zip(staged_NL2SKD, piece, strict=True):
                place.copy_(self._host_NL2SKD[source], non_blocking=True)
            self._device_L2NSKD[:, :, self._numbers([target for _, target in piece])] = staged_NL2SKD.movedim(0, 2)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of host blocks, [L, 2, N, S, K, D]."""
        if self._is_cuda:
            self._outward.synchronize()
        return self._host_NL2SKD[torch.tensor(blocks)].movedim(0, 2).contiguous()

    def measure(self) -> float:
        """Seconds to store and restore one block. What is in the blocks stays."""
        count = min(_PROBED_BLOCKS, self._host_NL2SKD.shape[0], self._device_L2NSKD.shape[2])
        pairs = [(number, number) for number in range(count)]
        started = 0.0
        for _ in range(2):  # the first one allocates
            self._synchronize()
            started = time.perf_counter()
            self.store(pairs)
            self.restore(pairs)
        self._synchronize()
        return (time.perf_counter() - started) / count

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device_L2NSKD.device)

    def _copy_out(self, staged_NL2SKD: Tensor, piece: list[BlockTransfer]) -> None:
        for block, (_, target) in zip(staged_NL2SKD, piece, strict=True):
            self._host_NL2SKD[target].copy_(block, non_blocking=True)

    def _numbers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device_L2NSKD.device)


def _pieces(blocks: list[BlockTransfer]) -> list[list[BlockTransfer]]:
    return [blocks[start : start + _PIECE_BLOCKS] for start in range(0, len(blocks), _PIECE_BLOCKS)]
