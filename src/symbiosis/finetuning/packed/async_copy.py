"""Numbers on their way from the device: asked for now, waited for later."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncCopy:
    def __init__(self, numbers: Tensor) -> None:
        """`numbers` may be changed afterwards, by whatever is launched after this."""
        self._event: torch.cuda.Event | None = None
        self._host = numbers.detach()
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Tensor:
        """On the CPU. Waits for what was launched before they were asked for, and for nothing else."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
