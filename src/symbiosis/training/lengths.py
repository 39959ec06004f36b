"""How long passes take by their size, and how large one may be so that nobody's step takes longer than its fair share.

Who is in every pass makes one step a pass. A session of few rows among many of many would be held up by the others'
rows: by itself it would make its steps so fast that even its part of the device is more than that. So no pass takes
longer than the smallest session's own would, times its share of the device; the larger ones have more passes instead.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence

_KEPT = 9  # passes of about one size
_ENOUGH = 3  # of them: the first may have compiled something


class Lengths:
    """Measured, as medians: now and then a pass takes long for other reasons than its rows."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}

    def note(self, rows: int, seconds: float) -> None:
        self._seen.setdefault(_size(rows), deque(maxlen=_KEPT)).append((rows, seconds))

    def knows(self, rows: int) -> bool:
        """Whether passes of about so many rows came often enough."""
        return len(self._seen.get(_size(rows), ())) >= _ENOUGH

    def rows_within(self, seconds: float, most: int) -> int:
        """The most rows that take no longer, as far as is known."""
        points = [(0, 0.0), *(self._point(size) for size in sorted(self._seen) if len(self._seen[size]) >= _ENOUGH)]
        for (few, short), (many, long) in itertools.pairwise(points):
            if long > seconds:
                part = max(0.0, seconds - short) / (long - short) if long > short else 0.0
                return min(most, few + int(part * (many - few)))
        return most

    def seconds(self, rows: int) -> float:
        """Of a size that is known."""
        at, seconds = self._point(_size(rows))
        return seconds * min(1.0, rows / at)

    def _point(self, size: int) -> tuple[int, float]:
        seen = self._seen[size]
        return round(statistics.median(rows for rows, _ in seen)), statistics.median(seconds for _, seconds in seen)


def smallest(rows: Sequence[int], shares: Sequence[float], most: int) -> int | None:
    """Whose step a pass of all of them would hold up most, if it might hold up anybody's; `shares` add up to 1."""
    if not rows:
        return None
    at = min(range(len(rows)), key=lambda each: rows[each] / shares[each])
    return at if min(most, sum(rows)) > rows[at] / shares[at] else None


def _size(rows: int) -> int:
    return max(1, rows).bit_length()
