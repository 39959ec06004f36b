"""The table by which kernels find the low-rank weights of every adapter on the device.

A line is (address of a [r, I], address of b [O, r], r, address of the stretch [O] or 0), all contiguous, b with the
scale in it; r = 0: the adapter does nothing to that layer. Lines are written and cleared on the stream that computes,
between passes, so no pass sees half of one.

S = slots, M = members (layers in a fixed order).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.serving.lora.lora_weights import EngineAdapter


class SlotTable:
    """Small numbers for adapters, and the table that they are rows of. Stepping thread only, but for `lines`."""

    def __init__(self, count: int, members: Sequence[str], device: torch.device) -> None:
        self.members = tuple(members)
        self.table_SM4 = torch.zeros(count, len(self.members), 4, dtype=torch.int64, device=device)
        self._places = {path: place for place, path in enumerate(self.members)}
        self._free = list(range(count - 1, -1, -1))
        self.rank = 16
        """The largest there has been, rounded up to a power of two: kernels are compiled for it."""

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, *paths: str) -> Tensor:
        """The part of the table, [S, len(paths), 4], of members that follow each other."""
        first = self._places[paths[0]]
        if self.members[first : first + len(paths)] != paths:
            raise ValueError(f"{', '.join(paths)} do not follow each other in the table")
        return self.table_SM4[:, first : first + len(paths)]

    def lines(self, adapter: EngineAdapter) -> Tensor:
        """An adapter's lines, [M, 4], in host memory. Any thread may make them."""
        found = [(0, 0, 0, 0)] * len(self.members)
        for path in adapter.parts:
            part = adapter.in_table(path)
            if part is not None and path in self._places:
                stretch = 0 if part.stretch_O is None else part.stretch_O.data_ptr()
                found[self._places[path]] = (part.a_rI.data_ptr(), part.b_Or.data_ptr(), part.a_rI.shape[0], stretch)
        lines = torch.tensor(found, dtype=torch.int64).view(len(self.members), 4)
        return lines.pin_memory() if self.table_SM4.is_cuda else lines

    def take(self, lines_M4: Tensor) -> int:
        """A slot with these lines; there must be a free one."""
        slot = self._free.pop()
        while self.rank < int(lines_M4[:, 2].max()):
            self.rank *= 2
        self.table_SM4[slot].copy_(lines_M4, non_blocking=True)
        return slot

    def give(self, slot: int) -> None:
        """The adapter leaves: its lines do nothing from now on."""
        assert slot not in self._free, f"slot {slot} is free already"
        self.table_SM4[slot].zero_()
        self._free.append(slot)
