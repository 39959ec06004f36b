"""Rows of a pass cut into tiles that one program computes together.

The kernels read the tiles from device memory, so that a CUDA graph, whose
number of programs is fixed, can be replayed for other rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that lie together and need the same: an adapter's weights, a sequence's keys."""

    slot: int
    """Of a table that says where that is; -1: nothing to do for these rows."""
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence in a pass."""

    start: int
    """Its first row in the pass."""
    count: int
    before: int
    """So many of its tokens are in its pages already."""
    pages: Sequence[int]


class Tiles:
    """The rows of a pass cut into at most `capacity` tiles of at most `rows` rows of one segment, on the device.

    Of the first `reach` rows of the pass, `slots_R` has the slots too.
    """

    def __init__(self, capacity: int, rows: int, device: torch.device | str, reach: int = 0) -> None:
        self.capacity, self.rows = capacity, rows
        self._spare = -3 * capacity % 4  # each part starts at a multiple of 16 bytes: kernels are compiled for that
        self._device = torch.full((3 * capacity + self._spare + reach,), -1, dtype=torch.int32, device=device)
        self.device_3T = self._device[: 3 * capacity].view(3, capacity)
        self.slots_R = self._device[3 * capacity + self._spare :]

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: int, device: torch.device | str, reach: int = 0) -> Tiles:
        """Just as many tiles as these take."""
        tiles = cls(max(1, sum(-(-s.count // rows) for s in segments if s.slot >= 0)), rows, device, reach)
        tiles.fill(segments)
        return tiles

    def fill(self, segments: Sequence[Segment]) -> None:
        """The rows of the next pass, in the order of the current stream."""
        cut = [
            (s.slot, start, min(self.rows, s.start + s.count - start))
            for s in segments
            if s.slot >= 0
            for start in range(s.start, s.start + s.count, self.rows)
        ]
        if len(cut) > self.capacity:
            raise ValueError(f"{len(cut)} tiles where there is room for {self.capacity}")
        cut += [(-1, 0, 0)] * (self.capacity - len(cut))
        reach = len(self.slots_R)
        slots = [-1] * reach
        for s in segments if reach else ():
            slots[s.start : s.start + s.count] = [s.slot] * s.count
        numbers = [*itertools.chain(*zip(*cut, strict=True)), *[0] * self._spare, *slots[:reach]]
        self._device.copy_(torch.tensor(numbers, dtype=torch.int32, pin_memory=self._device.is_cuda), non_blocking=True)
