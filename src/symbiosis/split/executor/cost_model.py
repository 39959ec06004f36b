"""What a batch costs: seconds per layer, direction and rows, learned from the batches that ran."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from symbiosis.common.bounded_dict import evict_oldest

_MOST_SHAPES = 4096
_ENOUGH = 8.0  # batches of its own, where its parts are known
_FEW, _MANY = 8, 1 << 20  # rows
_FADE = 0.98  # old batches count less: machines get busier and calmer


@dataclass(slots=True)
class _Line:
    """A fading least-squares line: seconds = fixed + per_row × rows."""

    n: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows2: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.n = self.n * _FADE + 1
        self.rows = self.rows * _FADE + rows
        self.seconds = self.seconds * _FADE + seconds
        self.rows2 = self.rows2 * _FADE + rows * rows
        self.rows_seconds = self.rows_seconds * _FADE + rows * seconds

    def fit(self) -> tuple[float, float]:
        if self.n == 0:
            return 0.0, 0.0
        spread = self.n * self.rows2 - self.rows * self.rows
        if spread <= 1e-9 * self.rows2 * self.n:
            return 0.0, self.seconds / max(1.0, self.rows)  # one size seen so far: nothing known to be saved
        per_row = max(0.0, (self.n * self.rows_seconds - self.rows * self.seconds) / spread)
        return max(0.0, (self.seconds - per_row * self.rows) / self.n), per_row


class CostModel:
    """Estimates for a policy. `observe` is called once a batch, `estimate` a few times a decision."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self._parts: dict[Hashable, list[Hashable]] = {}

    def observe(self, shape: Hashable, rows: int, seconds: float) -> None:
        line = self._lines.pop(shape, None) or _Line()
        evict_oldest(self._lines, _MOST_SHAPES)
        self._lines[shape] = line  # at the end: what is seen stays
        line.add(rows, seconds)

    def consists(self, shape: Hashable, parts: list[Hashable]) -> None:
        """A shape that costs what its parts cost, until it was seen itself."""
        evict_oldest(self._parts, _MOST_SHAPES)
        self._parts[shape] = parts

    def _fit(self, shape: Hashable) -> tuple[float, float]:
        """Fixed seconds, and seconds a row; nothing while nothing is known."""
        line = self._lines.get(shape)
        if line is not None and line.n > _ENOUGH:
            return line.fit()
        parts = [self._lines[part].fit() for part in self._parts.get(shape, ()) if part in self._lines]
        if not parts:
            return line.fit() if line is not None else (0.0, 0.0)
        return sum(fixed for fixed, _ in parts), sum(per_row for _, per_row in parts)

    def estimate(self, shape: Hashable, rows: int) -> float:
        """Seconds a batch of so many rows takes; 0.0 while nothing is known."""
        fixed, per_row = self._fit(shape)
        return fixed + per_row * rows

    def rows_within(self, shape: Hashable, seconds: float) -> int:
        """Most rows that take no longer; a few at least, which take hardly longer than one, or if nothing is known."""
        fixed, per_row = self._fit(shape)
        most = min(_MANY, (seconds - fixed) / per_row) if per_row else _MANY if seconds == math.inf else _FEW
        return max(_FEW, int(most))

    def is_mostly_fixed(self, shape: Hashable, rows: int) -> bool:
        """Whether so many rows cost less than having them at all (reading the weights): twice as many are nearly free."""
        fixed, per_row = self._fit(shape)
        return per_row * rows < fixed

    def saving(self, shape: Hashable) -> float:
        """Seconds saved by running two batches as one: the fixed part."""
        return self._fit(shape)[0]
