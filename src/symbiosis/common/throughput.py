"""Sliding-window throughput of amounts that are recorded in bursts."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0
_MIN_RECORDS = 10


class Throughput:
    """`recent` covers the last ten seconds or the last ten records, whichever is longer, and starts at `now`."""

    def __init__(self, now: float) -> None:
        self._records = deque([(now, 0)])
        self._start, self._total = now, 0

    def record(self, amount: int, now: float) -> None:
        self._total += amount
        self._records.append((now, self._total))
        while len(self._records) > _MIN_RECORDS + 1 and self._records[1][0] <= now - _WINDOW_S:
            self._records.popleft()

    @property
    def recent(self) -> float:
        """Amount per second of the window that ends at the last record; 0 without records."""
        (then, before), (now, after) = self._records[0], self._records[-1]
        return (after - before) / max(now - then, 1e-6)

    @property
    def mean(self) -> float:
        """Amount per second from the start to the last record."""
        return self._total / max(self._records[-1][0] - self._start, 1e-6)
