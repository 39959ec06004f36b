"""How many rows a pass may have so that whoever is served beside waits no longer than the provider wants."""

from __future__ import annotations

_WEIGHT = 0.3  # of the last pass
_FIRST = 64  # rows, before anything was measured


class Pace:
    """Measured seconds by row. Short passes count apart: a row of theirs takes longer than one of a full pass."""

    def __init__(self, short_s: float) -> None:
        self._short_s = short_s
        self._per_row: dict[bool, float] = {}

    def room(self, most: int, *, short: bool) -> int:
        """Rows of the next pass."""
        if not short:
            return most
        per_row = self._per_row.get(True, self._per_row.get(False))
        return min(most, _FIRST) if per_row is None else max(1, min(most, int(self._short_s / per_row)))

    def note(self, rows: int, seconds: float, *, short: bool) -> None:
        """A pass took so long."""
        found = seconds / max(1, rows)
        before = self._per_row.get(short, found)
        self._per_row[short] = before + _WEIGHT * (found - before)
