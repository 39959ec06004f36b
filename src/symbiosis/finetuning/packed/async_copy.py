"""Asynchronous copies between host and device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. Does not wait for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class AsyncCopy:
    """A device-to-host copy, launched at once and waited for by `read`."""

    def __init__(self, tensor: Tensor) -> None:
        """Kernels launched later may overwrite `tensor`."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Tensor:
        """The copy on the CPU. Waits only for work launched before the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
