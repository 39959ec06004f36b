"""Blocks of the KV cache as bytes, for other engines.

The bytes of some blocks are their keys and values, [L, 2, N, S, K, D] in the cache's dtype.

L = layers, N = blocks, S = tokens of a block, K = key heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from symbiosis.serving.model.host_kv import HostKV


class BlockContent:
    """Blocks on their way to host memory."""

    def __init__(self, content_L2NSKD: Tensor, copied: Any = None) -> None:
        """`copied`: a CUDA event."""
        self._content_L2NSKD, self._copied = content_L2NSKD, copied

    def wait(self) -> memoryview:
        """Their bytes. On any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        content: memoryview = self._content_L2NSKD.reshape(-1).view(torch.uint8).numpy().data
        return content


@dataclass(frozen=True, slots=True)
class ReceivedBlocks:
    """Blocks of another engine, on the device; they may still be on their way there."""

    content_L2NSKD: Tensor
    copied: Any = None
    """A CUDA event."""


class BlockMemory:
    """Reads and writes blocks. Used by the engine's thread, between two steps, but for `stage`."""

    def __init__(self, kv_cache_L2NSKD: Tensor, host: HostKV | None) -> None:
        self._cache_L2NSKD, self._host = kv_cache_L2NSKD, host
        layers, two, _, *block = kv_cache_L2NSKD.shape
        self._layers, self._block = (layers, two), tuple(block)
        self.layout = f"{'x'.join(map(str, (layers, two, *block)))} {str(kv_cache_L2NSKD.dtype).removeprefix('torch.')}"
        """Equal in engines that can exchange blocks, if they serve the same model."""
        self.block_bytes = kv_cache_L2NSKD[:, :, 0].nbytes
        is_cuda, device = kv_cache_L2NSKD.is_cuda, kv_cache_L2NSKD.device
        self._outward: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._inward: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._launched: Any = None

    def read(self, blocks: Sequence[int], *, on_host: bool) -> BlockContent:
        """Begin to copy blocks, or host blocks. What is written to them later does not change the content."""
        if on_host:
            assert self._host is not None, "there are no host blocks"
            return BlockContent(self._host.read(blocks))
        if self._outward is None:
            content_L2NSKD = torch.empty((*self._layers, len(blocks), *self._block), dtype=self._cache_L2NSKD.dtype)
            for start, stop in _runs(blocks):
                first = blocks[start]
                content_L2NSKD[:, :, start:stop] = self._cache_L2NSKD[:, :, first : first + stop - start]
            return BlockContent(content_L2NSKD)
        gathered_L2NSKD = self._cache_L2NSKD.index_select(2, self._numbers(blocks))
        content_L2NSKD = torch.empty(gathered_L2NSKD.shape, dtype=gathered_L2NSKD.dtype, pin_memory=True)
        self._outward.wait_stream(torch.cuda.current_stream(gathered_L2NSKD.device))
        with torch.cuda.stream(self._outward):
            content_L2NSKD.copy_(gathered_L2NSKD, non_blocking=True)
            gathered_L2NSKD.record_stream(self._outward)
            return BlockContent(content_L2NSKD, self._outward.record_event())

    def stage(self, content: bytes | memoryview) -> ReceivedBlocks:
        """Begin to bring blocks to the device. On any thread; `content` must not change until they were written."""
        flat = torch.frombuffer(content, dtype=torch.uint8).view(self._cache_L2NSKD.dtype)
        content_L2NSKD = flat.view(*self._layers, -1, *self._block)
        if self._inward is None:
            return ReceivedBlocks(content_L2NSKD)
        with torch.cuda.stream(self._inward):
            return ReceivedBlocks(content_L2NSKD.to(self._cache_L2NSKD.device), self._inward.record_event())

    def write(self, blocks: Sequence[int], received: ReceivedBlocks) -> None:
        """Write the last of the received blocks."""
        content_L2NSKD = received.content_L2NSKD
        skipped = content_L2NSKD.shape[2] - len(blocks)
        if received.copied is not None:
            stream = torch.cuda.current_stream(content_L2NSKD.device)
            stream.wait_event(received.copied)
            self._cache_L2NSKD.index_copy_(2, self._numbers(blocks), content_L2NSKD[:, :, skipped:])
            content_L2NSKD.record_stream(stream)
            return
        for start, stop in _runs(blocks):
            first = blocks[start]
            self._cache_L2NSKD[:, :, first : first + stop - start] = content_L2NSKD[:, :, skipped + start : skipped + stop]

    def wait_for_last(self) -> None:
        """Wait until the device has computed what was launched before the last call: one step stays in flight."""
        if self._inward is None:
            return
        before, self._launched = self._launched, torch.cuda.current_stream(self._cache_L2NSKD.device).record_event()
        if before is not None:
            before.synchronize()

    def _numbers(self, blocks: Sequence[int]) -> Tensor:
        """Without waiting for the device, which computes a step."""
        is_cuda = self._cache_L2NSKD.is_cuda
        return torch.tensor(blocks, pin_memory=is_cuda).to(self._cache_L2NSKD.device, non_blocking=True)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions, from and to, of blocks that follow each other in memory."""
    start = 0
    for position, (before, after) in enumerate(pairwise(blocks), 1):
        if after != before + 1:
            yield start, position
            start = position
    yield start, len(blocks)
