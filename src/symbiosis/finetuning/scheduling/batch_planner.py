"""Plans the next pass: which sessions take part, and with how many examples.

Fairness chooses the examples. Their number is bounded by the time budget of the permit, by step time fairness, and by
memory.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from symbiosis.device_sharing.cpu_time_share import PassBudget
from symbiosis.finetuning.scheduling.fairness import Candidate, Fairness
from symbiosis.finetuning.scheduling.pass_time_budget import PassTimeBudget
from symbiosis.finetuning.scheduling.step_time_fairness import StepTimeFairness

_PASSES_BEFORE_GROWTH = 500  # that fit into memory; then larger ones are tried again
_MAX_NEW_IN_A_ROW = 8  # after these, passes of new shapes count as typical
_log = logging.getLogger("symbiosis")


class BatchPlanner:
    """The trainer holds the lock."""

    def __init__(self, max_rows: int, *, min_rows: int = 1) -> None:
        """Passes of fewer than `min_rows` take as long. If it is above 1 (on a GPU), time budgets are rounded to few sizes:
        CUDA graphs of repeated shapes are faster.
        """
        self._max_rows, self._min_rows = max_rows, min(min_rows, max_rows)
        self.rows = max_rows
        """Rows that fit into memory, as far as is known."""
        self._fitted = 0  # passes since the last that did not fit
        self._new_in_a_row = 0
        self.fairness, self._time_budget = Fairness(), PassTimeBudget()
        self._step_times: defaultdict[str, StepTimeFairness] = defaultdict(StepTimeFairness)  # by kind of pass

    def max_rows(self, permit: PassBudget) -> int:
        """Of the next pass."""
        rows = max(self._time_budget.max_rows(self.rows, permit.kind, permit.max_s), min(self._min_rows, self.rows))
        return rows if rows == self.rows or self._min_rows == 1 else _round_down(rows)

    def plan(self, candidates: Sequence[Candidate], permit: PassBudget) -> dict[str, int]:
        """The number of examples by session, in the order they were chosen."""
        chosen, max_rows = self._step_times[permit.kind].limit(candidates, self.max_rows(permit))
        return self.fairness.pick(chosen, max_rows)

    def record_pass(self, permit: PassBudget, rows: int, seconds: float, *, is_new: bool = False) -> None:
        """Measure a pass. The first passes of a shape (`is_new`) are slower than later ones."""
        self._new_in_a_row = self._new_in_a_row + 1 if is_new else 0
        self._step_times[permit.kind].observe(rows, seconds)
        if not is_new or self._new_in_a_row > _MAX_NEW_IN_A_ROW:
            self._time_budget.observe(permit.kind, rows, seconds)
        self._fitted += 1
        if self._fitted % _PASSES_BEFORE_GROWTH == 0:
            self.rows = min(self._max_rows, 2 * self.rows)

    def record_out_of_memory(self, rows: int) -> None:
        """Halve the limit after a pass that did not fit."""
        self.rows, self._fitted = max(1, min(self.rows, rows) // 2), 0
        _log.warning("a training pass of %d rows does not fit into memory: at most %d from now on", rows, self.rows)

    def remove_session(self, tenant: str, session: str) -> None:
        self.fairness.remove_session(tenant, session)
        for step_times in self._step_times.values():
            step_times.forget(session)


def _round_down(rows: int) -> int:
    """To 256, 384, 512, 768, 1024 …"""
    power = 1 << rows.bit_length() - 1
    return power + power // 2 if rows >= power + power // 2 else power
