"""Whose examples go into the next pass, and how many: by `fairness`, and by how long a pass may take.

It may be short since answers are served (`pace`), should hold up nobody's step (`lengths`), and has to fit into memory.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from symbiosis.device_sharing.cpu_time_share import PassBudget
from symbiosis.finetuning.scheduling.fairness import Candidate, Fairness
from symbiosis.finetuning.scheduling.pass_time_budget import PassTimeBudget
from symbiosis.finetuning.scheduling.step_time_fairness import StepTimeFairness

_FITTED = 500  # passes after which larger ones are tried again
_NEW = 8  # passes of new kinds in a row: then that is how it is
_log = logging.getLogger("symbiosis")


class BatchPlanner:
    """The host has the lock."""

    def __init__(self, most: int, *, least: int = 1) -> None:
        """Rows of a pass; fewer than `least` would take as long. Where that is so (on a GPU) the room for short ones is of few
        sizes, since passes that come again and again are faster (`replays`).
        """
        self._most, self._least = most, min(least, most)
        self.rows = most
        """What fits into memory, as far as is known."""
        self._fitted = 0
        """Passes since one did not."""
        self._new = 0
        """The last so many were of new kinds."""
        self.fairness, self._pace = Fairness(), PassTimeBudget()
        self._lengths: defaultdict[str, StepTimeFairness] = defaultdict(StepTimeFairness)
        """Of each kind of passes."""

    def room(self, permit: PassBudget) -> int:
        """Rows of the next pass, at most."""
        room = max(self._pace.max_rows(self.rows, permit.kind, permit.max_s), min(self._least, self.rows))
        return room if room == self.rows or self._least == 1 else _round(room)

    def pick(self, waiting: Sequence[Candidate], permit: PassBudget) -> dict[str, int]:
        """How many examples of which sessions, in the order they were chosen."""
        chosen, room = self._lengths[permit.kind].limit(waiting, self.room(permit))
        return self.fairness.pick(chosen, room)

    def note(self, permit: PassBudget, rows: int, seconds: float, *, is_new: bool = False) -> None:
        """A pass took so long, the first ones of its kind longer than others will."""
        self._new = self._new + 1 if is_new else 0
        self._lengths[permit.kind].observe(rows, seconds)
        if not is_new or self._new > _NEW:
            self._pace.observe(permit.kind, rows, seconds)
        self._fitted += 1
        if self._fitted % _FITTED == 0:
            self.rows = min(self._most, 2 * self.rows)

    def too_large(self, rows: int) -> None:
        """A pass of so many did not fit into memory."""
        self.rows, self._fitted = max(1, min(self.rows, rows) // 2), 0
        _log.warning("a training pass of %d rows does not fit into memory: at most %d from now on", rows, self.rows)

    def forget(self, tenant: str, session: str) -> None:
        """It is gone."""
        self.fairness.forget(tenant, session)
        for lengths in self._lengths.values():
            lengths.forget(session)


def _round(rows: int) -> int:
    """Down to 256, 384, 512, 768, 1024 …"""
    power = 1 << rows.bit_length() - 1
    return power + power // 2 if rows >= power + power // 2 else power
