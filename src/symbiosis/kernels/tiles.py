"""Rows of a batch cut into tiles, which one program computes at once.

The kernels read the tiles from device memory. So a CUDA graph, whose number of programs is fixed, can be replayed for
other rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows that share a slot: an adapter's weights, a sequence's keys."""

    slot: int
    """A line of the table that holds the addresses; -1: these rows are skipped."""
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence in a batch."""

    start: int
    """Its first row in the batch."""
    count: int
    before: int
    """Tokens of the sequence that are in the KV cache already."""
    block_table: Sequence[int]


class Tiles:
    """The rows of a batch in at most `capacity` tiles, each of at most `rows` rows of one segment, on the device.

    `slots_R` holds the slots of the first `reach` rows of the batch.
    """

    def __init__(
        self, capacity: int, rows: int, device: torch.device | str, reach: int = 0, typical: int | None = None
    ) -> None:
        self.capacity, self.rows = capacity, rows
        self.typical = capacity if typical is None else typical
        """Tiles of a usual batch: launches are planned for so many."""
        self._padding = -3 * capacity % 4  # each part starts at a multiple of 16 bytes: kernels are compiled for that
        self._device = torch.full((3 * capacity + self._padding + reach,), -1, dtype=torch.int32, device=device)
        self.device_3T = self._device[: 3 * capacity].view(3, capacity)
        self.slots_R = self._device[3 * capacity + self._padding :]

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: int, device: torch.device | str, reach: int = 0) -> Tiles:
        """Exactly as many tiles as these segments need."""
        tiles = cls(max(1, sum(-(-s.count // rows) for s in segments if s.slot >= 0)), rows, device, reach)
        tiles.fill(segments)
        return tiles

    def fill(self, segments: Sequence[Segment]) -> None:
        """Write the rows of the next batch, in the order of the current stream."""
        cut = [
            (s.slot, start, min(self.rows, s.start + s.count - start))
            for s in segments
            if s.slot >= 0
            for start in range(s.start, s.start + s.count, self.rows)
        ]
        if len(cut) > self.capacity:
            raise ValueError(f"too many tiles: {len(cut)} needed > {self.capacity} allocated")
        cut += [(-1, 0, 0)] * (self.capacity - len(cut))
        reach = len(self.slots_R)
        slots = [-1] * reach
        for s in segments if reach else ():
            slots[s.start : s.start + s.count] = [s.slot] * s.count
        numbers = [*itertools.chain(*zip(*cut, strict=True)), *[0] * self._padding, *slots[:reach]]
        self._device.copy_(torch.tensor(numbers, dtype=torch.int32, pin_memory=self._device.is_cuda), non_blocking=True)
