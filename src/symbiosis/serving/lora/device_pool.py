"""Where adapters are computed with, and how they get there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from symbiosis.serving.lora.packed_adapter import PackedAdapter


class CpuPool:
    """Host memory is what it computes with: nothing is copied, `size` is only counted. Also what every device does."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Most bytes that adapters take."""

    def adopt(self, flat: PackedAdapter) -> PackedAdapter | None:
        """The adapter as it can be computed with where it lies; None: it has to be brought."""
        return flat

    def fence(self) -> torch.cuda.Event | None:
        """After everything the stepping thread has launched."""
        return None

    def bring(self, flat: PackedAdapter, offset: int, fence: torch.cuda.Event | None) -> PackedAdapter:
        """Copy it to `offset`, not before `fence`; returns when it is there. Not on the stepping thread."""
        return flat

    def working(self) -> AbstractContextManager[object]:
        """What is computed within, on any thread, is in nobody's way."""
        return nullcontext()


class CudaPool(CpuPool):
    """A range of GPU memory of its own and a stream of its own: nothing is allocated while others compute."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def adopt(self, flat: PackedAdapter) -> PackedAdapter | None:
        return None

    def fence(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._memory.device))
        return event

    def bring(self, flat: PackedAdapter, offset: int, fence: torch.cuda.Event | None) -> PackedAdapter:
        target = self._memory[offset : offset + flat.size]
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            if fence is not None:
                self._copies.wait_event(fence)
            target.copy_(flat.memory, non_blocking=True)
            arrived.record(self._copies)
        there = flat.at(target)  # while the bytes travel
        arrived.synchronize()
        return there

    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._work)
