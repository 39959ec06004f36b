"""Connections of each worker process, in memory that all of them map: new ones go to those with few."""

from __future__ import annotations

import mmap
import os

_MAX_WORKERS = 64
_BYTES = 4 * _MAX_WORKERS
_TOLERANCE = 4
"""A worker takes a connection unless another one has this many fewer."""


def create_counts() -> int:
    """A file descriptor of the memory, to be inherited."""
    fd = os.memfd_create("symbiosis-connections", 0)
    os.ftruncate(fd, _BYTES)
    return fd


class SharedCounts:
    """The view of worker number `own` of `workers`."""

    def __init__(self, fd: int, own: int, workers: int) -> None:
        self._numbers = memoryview(mmap.mmap(fd, _BYTES)).cast("i")[:workers]
        self._own = own
        self.set(0)

    def set(self, connections: int) -> None:
        self._numbers[self._own] = connections

    def is_low(self) -> bool:
        """Whether this worker should take the next connection."""
        return self._numbers[self._own] <= min(self._numbers) + _TOLERANCE
