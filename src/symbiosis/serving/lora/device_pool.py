"""Device memory that adapters are computed from, and the copies into it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from symbiosis.serving.lora.packed_adapter import PackedAdapter


class CpuPool:
    """The CPU computes in host memory: nothing is copied, and `size` only bounds the total. Base class of all pools."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Capacity in bytes."""
        self.is_allocated = False
        """Whether the pool holds its whole capacity, and not only what adapters use."""

    def adopt(self, packed: PackedAdapter) -> PackedAdapter | None:
        """The adapter where it lies, if the device can compute from there; None if it must be copied."""
        return packed

    def record_fence(self) -> torch.cuda.Event | None:
        """An event after all work that the stepping thread has launched."""
        return None

    def copy_in(self, packed: PackedAdapter, offset: int, fence: torch.cuda.Event | None) -> PackedAdapter:
        """Copy to `offset` after `fence`. Blocks until the copy is complete. Not for the stepping thread."""
        return packed

    def use_side_stream(self) -> AbstractContextManager[object]:
        """Work launched inside, on any thread, does not delay the stepping thread's."""
        return nullcontext()


class CudaPool(CpuPool):
    """A preallocated range of GPU memory with its own streams. Loads allocate nothing while batches run."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.is_allocated = True
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def adopt(self, packed: PackedAdapter) -> PackedAdapter | None:
        return None

    def record_fence(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._memory.device))
        return event

    def copy_in(self, packed: PackedAdapter, offset: int, fence: torch.cuda.Event | None) -> PackedAdapter:
        target = self._memory[offset : offset + packed.nbytes]
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            if fence is not None:
                self._copy_stream.wait_event(fence)
            target.copy_(packed.memory, non_blocking=True)
            copied.record(self._copy_stream)
        on_device = packed.rebase(target)  # overlaps with the copy
        copied.synchronize()
        return on_device

    def use_side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side_stream)
