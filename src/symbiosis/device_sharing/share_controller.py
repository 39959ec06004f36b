"""How much of a GPU may training have while answers are served? A pure object: it sees how long the engine's passes took.

What counts is the tail, since that is what a reader notices. A part that lets most tokens come in time may still be too
large for some, and how it is in between cannot be told from the middle. A larger part is tried only after several
comparisons that allow it, and each time it proved too large after so many more: a part that changes often would have
passes made ready for it again and again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_FIRST = 0.5  # of the multiprocessors
_GRAIN = 8  # parts are multiples of one 8th
_NEARLY = 1.015  # times what is allowed is not too much yet
_TAIL = 0.98  # of the passes that decode take no longer
_PROMPT = 2.0  # times the middle: what takes longer did more than decode
_CALM, _CALMEST = 4, 64  # comparisons in a row that allow more


class ShareController:
    def __init__(self, allowed: float) -> None:
        """A token may take so many times as long."""
        self.share, self._allowed = _FIRST, allowed
        self._calm, self._patience = 0, _CALM
        self._grown_from: float | None = None

    def compare(self, beside: Sequence[float], alone: Sequence[float]) -> bool:
        """Seconds of passes beside training, and without it. Whether the share is another now."""
        share = fitting(self.share, tail(beside) / statistics.median(alone), self._allowed)
        if share > self.share:
            self._calm += 1
            if self._calm < self._patience:
                self._grown_from = None
                return False
        elif share < self.share and self._grown_from is not None:
            share, self._patience = self._grown_from, min(2 * self._patience, _CALMEST)
        before, self.share, self._calm = self.share, share, 0
        self._grown_from = before if share > before else None
        return share != before


def tail(seconds: Sequence[float]) -> float:
    """How long the slowest passes that decode take."""
    decoding = sorted(each for each in seconds if each <= _PROMPT * statistics.median(seconds))
    return decoding[min(len(decoding) - 1, int(_TAIL * len(decoding)))]


def fitting(share: float, slower: float, allowed: float) -> float:
    """The part with which passes are so much slower as is allowed, if this one makes them `slower`.

    What they lose is about in proportion. At most half as much more or less at a time.
    """
    now, wanted = _GRAIN * share, _GRAIN * share * (_NEARLY * allowed - 1) / max(slower - 1, 0.01)
    parts = math.floor(max(0.5 * now, min(max(1.5 * now, now + 1), wanted)) + 1e-6)
    return max(1, min(_GRAIN - 1, parts)) / _GRAIN
