"""How long passes take by their size, and how large one may be so that nobody's step takes longer than its fair share.

Who is in every pass makes one step a pass. A session of few rows among many of many would be held up by the others'
rows: by itself it would make its steps so fast that even its part of the device is more than that. So no pass takes
longer than the smallest session's own would, divided by its share of the device; the larger ones have more passes instead.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence

from symbiosis.finetuning.scheduling.fairness import Candidate

FEW_ROWS = 256
"""A CPU gains hardly anything by passes of more, a GPU by passes of fewer."""
_KEPT = 9  # passes of about one size
_ENOUGH = 5  # of them: the first have compiled something, or were captured


class StepTimeFairness:
    """Of one kind of passes, measured: the fastest of the last few of each size, since others did more than compute."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._alone: Counter[str] = Counter()

    def note(self, rows: int, seconds: float) -> None:
        self._seen.setdefault(_size(rows), deque(maxlen=_KEPT)).append((rows, seconds))

    def fair(self, candidates: Sequence[Candidate], room: int) -> tuple[Sequence[Candidate], int]:
        """Who may be in the next pass, and how many rows, so that it holds up nobody's step."""
        rows, shares = [sum(each.costs) for each in candidates], shares_of(candidates)
        at = smallest(rows, shares, room)
        if at is None or min(room, sum(rows)) <= FEW_ROWS:
            return candidates, room
        who = candidates[at]
        if not self._knows(rows[at]):
            if self._alone[who.session] >= _ENOUGH:
                return candidates, room  # it never came alone with so many rows
            self._alone[who.session] += 1
            return [who], room  # by itself, a few times: that is what it would take alone
        longest = max(max(each.costs) for each in candidates)  # examples that could share a pass are not parted
        fair = self.rows_within(self._seconds(rows[at]) / shares[at], room)
        return candidates, min(room, max(fair, rows[at] + longest, FEW_ROWS))

    def forget(self, session: str) -> None:
        """It is gone."""
        self._alone.pop(session, None)

    def rows_within(self, seconds: float, most: int) -> int:
        """The most rows that take no longer, as far as is known."""
        points = [(0, 0.0), *(self._point(size) for size in sorted(self._seen) if len(self._seen[size]) >= _ENOUGH)]
        for (few, short), (many, long) in itertools.pairwise(points):
            if long > seconds:
                part = max(0.0, seconds - short) / (long - short) if long > short else 0.0
                return min(most, few + int(part * (many - few)))
        return most

    def _knows(self, rows: int) -> bool:
        """Whether passes of about so many rows came often enough."""
        return len(self._seen.get(_size(rows), ())) >= _ENOUGH

    def _seconds(self, rows: int) -> float:
        """Of a size that is known."""
        at, seconds = self._point(_size(rows))
        return seconds * min(1.0, rows / at)

    def _point(self, size: int) -> tuple[int, float]:
        return min(self._seen[size], key=lambda each: each[1])


def shares_of(candidates: Sequence[Candidate]) -> list[float]:
    """Of the device: by weight among tenants, as passes are shared, and equal parts among a tenant's sessions."""
    sessions = Counter(each.tenant for each in candidates)
    whole = sum(each.weight / sessions[each.tenant] for each in candidates)
    return [each.weight / sessions[each.tenant] / whole for each in candidates]


def smallest(rows: Sequence[int], shares: Sequence[float], most: int) -> int | None:
    """Whose step a pass of all of them would hold up most, if it might hold up anybody's; `shares` add up to 1."""
    if not rows:
        return None
    at = min(range(len(rows)), key=lambda each: rows[each] / shares[each])
    return at if min(most, sum(rows)) > rows[at] / shares[at] else None


def _size(rows: int) -> int:
    return max(1, rows).bit_length()
