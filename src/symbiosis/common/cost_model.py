"""Time of a batch as a function of its rows, learned from batches that ran: seconds = fixed + per row × rows, by key."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from symbiosis.common.bounded_dict import evict_oldest

_MAX_KEYS = 4096
_MIN_BATCHES = 8.0  # of its own, before a key with parts is estimated without them
_MIN_ROWS, _MAX_ROWS = 8, 1 << 20


@dataclass(slots=True)
class _Line:
    """A least-squares line whose old points fade."""

    n: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows2: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: int, seconds: float, fade: float) -> None:
        self.n = self.n * fade + 1
        self.rows = self.rows * fade + rows
        self.seconds = self.seconds * fade + seconds
        self.rows2 = self.rows2 * fade + rows * rows
        self.rows_seconds = self.rows_seconds * fade + rows * seconds

    def fit(self) -> tuple[float, float]:
        """Fixed seconds and seconds per row."""
        spread = self.n * self.rows2 - self.rows * self.rows
        if spread <= 1e-9 * self.rows2 * self.n:  # one size so far: no fixed part is known
            return 0.0, self.seconds_per_row()
        per_row = max(0.0, (self.n * self.rows_seconds - self.rows * self.seconds) / spread)
        return max(0.0, (self.seconds - per_row * self.rows) / self.n), per_row

    def seconds_per_row(self) -> float:
        """The mean over all rows: stable where all batches have about the same size, and a line is not."""
        return self.seconds / max(1.0, self.rows)


class CostModel:
    """`observe` is called once a batch, the estimates a few times a decision."""

    def __init__(self, fade: float = 0.98) -> None:
        """Each batch multiplies the weight of earlier ones by `fade`: the load of a machine changes."""
        self._fade = fade
        self._lines: dict[Hashable, _Line] = {}
        self._parts: dict[Hashable, list[Hashable]] = {}

    def observe(self, key: Hashable, rows: int, seconds: float) -> None:
        line = self._lines.pop(key, None) or _Line()
        evict_oldest(self._lines, _MAX_KEYS)
        self._lines[key] = line  # most recently used
        line.add(rows, seconds, self._fade)

    def set_parts(self, key: Hashable, parts: list[Hashable]) -> None:
        """Estimate a key by the sum of its parts, until enough of its own batches ran."""
        evict_oldest(self._parts, _MAX_KEYS)
        self._parts[key] = parts

    def _fit(self, key: Hashable) -> tuple[float, float]:
        """Fixed seconds and seconds per row; zeros for an unknown key."""
        line = self._lines.get(key)
        if line is not None and line.n > _MIN_BATCHES:
            return line.fit()
        parts = [self._lines[part].fit() for part in self._parts.get(key, ()) if part in self._lines]
        if not parts:
            return line.fit() if line is not None else (0.0, 0.0)
        return sum(fixed for fixed, _ in parts), sum(per_row for _, per_row in parts)

    def estimate(self, key: Hashable, rows: int) -> float:
        """Seconds of a batch; 0.0 for an unknown key."""
        fixed, per_row = self._fit(key)
        return fixed + per_row * rows

    def seconds_per_row(self, key: Hashable) -> float | None:
        """The mean of a key, or for an unknown one the least of all; None without any."""
        line = self._lines.get(key)
        return line.seconds_per_row() if line else min((each.seconds_per_row() for each in self._lines.values()), default=None)

    def rows_within(self, key: Hashable, seconds: float) -> int:
        """Most rows that take no longer. At least a few, which take hardly longer than one; these for an unknown key."""
        fixed, per_row = self._fit(key)
        most = min(_MAX_ROWS, (seconds - fixed) / per_row) if per_row else _MAX_ROWS if seconds == math.inf else _MIN_ROWS
        return max(_MIN_ROWS, int(most))

    def is_mostly_fixed(self, key: Hashable, rows: int) -> bool:
        """Whether the fixed part (reading the weights) exceeds that of the rows: twice as many rows are nearly free."""
        fixed, per_row = self._fit(key)
        return per_row * rows < fixed

    def estimate_saving(self, key: Hashable) -> float:
        """Seconds saved by running two batches as one: the fixed part."""
        return self._fit(key)[0]
