"""Rows of a training pass that fit into a time budget."""

from __future__ import annotations

import math

from symbiosis.common.cost_model import CostModel

_FADE = 0.7  # by pass: the budget follows the load within a few passes
_FIRST_ROWS = 64  # before a pass was measured


class PassTimeBudget:
    """By measured seconds per row. Kinds of passes are measured apart: a row of a short pass takes longer."""

    def __init__(self) -> None:
        self._costs = CostModel(_FADE)

    def max_rows(self, limit: int, kind: str, budget_s: float) -> int:
        """Rows of the next pass, at most `limit` and at least 1."""
        if math.isinf(budget_s):
            return limit
        per_row_s = self._costs.seconds_per_row(kind)
        return min(limit, _FIRST_ROWS) if per_row_s is None else max(1, min(limit, int(budget_s / per_row_s)))

    def observe(self, kind: str, rows: int, seconds: float) -> None:
        self._costs.observe(kind, rows, seconds)
