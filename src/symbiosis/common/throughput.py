"""How fast something goes that is told of in bunches."""

from __future__ import annotations

from collections import deque

_SECONDS = 10.0
_TOLD = 10


class Throughput:
    """The mean over the last ten seconds or ten tellings, whichever reach further back, but not before it began."""

    def __init__(self, now: float) -> None:
        self._told = deque([(now, 0)])
        self._began, self._all = now, 0

    def record(self, amount: int, now: float) -> None:
        self._all += amount
        self._told.append((now, self._all))
        while len(self._told) > _TOLD + 1 and self._told[1][0] <= now - _SECONDS:
            self._told.popleft()

    @property
    def recent(self) -> float:
        """By the second, at the last telling; 0 before any."""
        (then, before), (now, after) = self._told[0], self._told[-1]
        return (after - before) / max(now - then, 1e-6)

    @property
    def mean(self) -> float:
        """By the second, from the beginning to the last telling."""
        return self._all / max(self._told[-1][0] - self._began, 1e-6)
