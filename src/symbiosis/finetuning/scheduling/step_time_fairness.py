"""How large a training pass may be so that no session's optimizer step takes longer than its fair share of the device allows.

A session that is in every pass makes one step a pass. A session of few rows is delayed by the rows of the others: alone
on its share of the device it would be faster. So no pass takes longer than the smallest session's own pass would,
divided by its share. Larger sessions need more passes instead.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence

from symbiosis.finetuning.scheduling.fairness import Candidate

FEW_ROWS = 256
"""Larger passes gain hardly anything on a CPU; smaller passes gain nothing on a GPU."""
_MAX_SAMPLES = 9  # of about one size
_MIN_SAMPLES = 5  # the first passes compile kernels or capture graphs


class StepTimeFairness:
    """For one kind of passes. Times are the fastest of the last few of each size: slower ones did more than compute.

    A mean, as in `common.cost_model`, would count compilation and captures.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # (rows, seconds) by size
        self._runs_alone: Counter[str] = Counter()

    def observe(self, rows: int, seconds: float) -> None:
        self._samples.setdefault(_size(rows), deque(maxlen=_MAX_SAMPLES)).append((rows, seconds))

    def limit(self, candidates: Sequence[Candidate], max_rows: int) -> tuple[Sequence[Candidate], int]:
        """Which sessions may be in the next pass, and how many rows it may have."""
        rows, shares = [sum(each.costs) for each in candidates], device_shares(candidates)
        at = most_delayed(rows, shares, max_rows)
        if at is None or min(max_rows, sum(rows)) <= FEW_ROWS:
            return candidates, max_rows
        smallest = candidates[at]
        if not self._is_measured(rows[at]):
            if self._runs_alone[smallest.session] >= _MIN_SAMPLES:
                return candidates, max_rows  # its passes alone had other sizes
            self._runs_alone[smallest.session] += 1
            return [smallest], max_rows  # alone, a few times, to measure its own time
        longest = max(max(each.costs) for each in candidates)  # examples that fit into one pass stay together
        fair = self.rows_within(self._seconds(rows[at]) / shares[at], max_rows)
        return candidates, min(max_rows, max(fair, rows[at] + longest, FEW_ROWS))

    def forget(self, session: str) -> None:
        """Drop the state of a closed session."""
        self._runs_alone.pop(session, None)

    def rows_within(self, seconds: float, limit: int) -> int:
        """The most rows that take no longer, by linear interpolation between measured sizes."""
        points = [
            (0, 0.0),
            *(self._fastest(size) for size in sorted(self._samples) if len(self._samples[size]) >= _MIN_SAMPLES),
        ]
        for (few, short), (many, long) in itertools.pairwise(points):
            if long > seconds:
                part = max(0.0, seconds - short) / (long - short) if long > short else 0.0
                return min(limit, few + int(part * (many - few)))
        return limit

    def _is_measured(self, rows: int) -> bool:
        return len(self._samples.get(_size(rows), ())) >= _MIN_SAMPLES

    def _seconds(self, rows: int) -> float:
        """Of a measured size."""
        at, seconds = self._fastest(_size(rows))
        return seconds * min(1.0, rows / at)

    def _fastest(self, size: int) -> tuple[int, float]:
        return min(self._samples[size], key=lambda each: each[1])


def device_shares(candidates: Sequence[Candidate]) -> list[float]:
    """Each session's share of the device: by weight among tenants, in equal parts among the sessions of a tenant."""
    sessions = Counter(each.tenant for each in candidates)
    whole = sum(each.weight / sessions[each.tenant] for each in candidates)
    return [each.weight / sessions[each.tenant] / whole for each in candidates]


def most_delayed(rows: Sequence[int], shares: Sequence[float], max_rows: int) -> int | None:
    """The session whose step a pass of all sessions would delay most; None if it delays none. `shares` add up to 1."""
    if not rows:
        return None
    at = min(range(len(rows)), key=lambda each: rows[each] / shares[each])
    return at if min(max_rows, sum(rows)) > rows[at] / shares[at] else None


def _size(rows: int) -> int:
    return max(1, rows).bit_length()
