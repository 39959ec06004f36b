"""How many rows a pass may have so that it takes no longer than it should."""

from __future__ import annotations

import math

_WEIGHT = 0.3  # of the last pass
_FIRST = 64  # rows, before anything was measured


class PassTimeBudget:
    """Measured seconds by row. Kinds of passes count apart: a row of a short one takes longer than one of a full pass."""

    def __init__(self) -> None:
        self._per_row: dict[str, float] = {}

    def room(self, most: int, kind: str, most_s: float) -> int:
        """Rows of the next pass."""
        if math.isinf(most_s):
            return most
        per_row = self._per_row.get(kind, min(self._per_row.values(), default=None))
        return min(most, _FIRST) if per_row is None else max(1, min(most, int(most_s / per_row)))

    def note(self, kind: str, rows: int, seconds: float) -> None:
        """A pass took so long."""
        found = seconds / max(1, rows)
        before = self._per_row.get(kind, found)
        self._per_row[kind] = before + _WEIGHT * (found - before)
