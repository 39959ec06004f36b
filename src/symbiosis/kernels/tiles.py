"""Rows of a pass cut into tiles that one program computes together.

The kernels read the tiles from device memory, so that a CUDA graph, whose
number of programs is fixed, can be replayed for other rows.
"""

from __future__ import annotations

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
    """The rows of a pass cut into at most `capacity` tiles of at most `rows` rows of one segment, on the device."""

    def __init__(self, capacity: int, rows: int, device: torch.device | str) -> None:
        self.capacity, self.rows = capacity, rows
        self.device_3T = torch.zeros(3, capacity, dtype=torch.int32, device=device)
        self.device_3T[0] = -1

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: int, device: torch.device | str) -> Tiles:
        """Just as many tiles as these take."""
        tiles = cls(max(1, sum(-(-s.count // rows) for s in segments if s.slot >= 0)), rows, device)
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
        host_3T = torch.tensor(list(zip(*cut, strict=True)), dtype=torch.int32, pin_memory=self.device_3T.is_cuda)
        self.device_3T.copy_(host_3T, non_blocking=True)
