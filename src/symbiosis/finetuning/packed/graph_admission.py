"""Which passes come often enough to be worth a graph? A pure object: it sees keys.

Making one takes longer than the pass it saves launching. So a key has to come a few times first; and once there is no
room for more, clearly more often than the one that would have to go: keys that come in turn do not drive each other out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

_OFTEN = 2  # times; then it is worth one
_CLEARLY = 4  # times as often, lately, as the one that goes
_HALVED = 128  # passes, after which what came before them counts half
_REFUSED = 4096  # keys that are remembered


class GraphAdmission:
    def __init__(self, most: int) -> None:
        """At most so many are kept."""
        self._most = most
        self._kept: set[Hashable] = set()
        self._never: set[Hashable] = set()
        self._counts: Counter[Hashable] = Counter()
        self._passes = 0

    def came(self, key: Hashable) -> None:
        """A pass of this key is to be computed."""
        self._counts[key] += 1
        self._passes += 1
        if self._passes % _HALVED == 0:
            self._counts = Counter({each: count // 2 for each, count in self._counts.items() if count > 1})

    def is_coming(self, key: Hashable) -> bool:
        """Whether it may soon be kept, if it is not."""
        return key not in self._never and (len(self._kept) < self._most or self.is_worth(key))

    def is_worth(self, key: Hashable) -> bool:
        """Whether it should be kept, if it is not."""
        if key in self._never or self._counts[key] <= _OFTEN:
            return False
        return len(self._kept) < self._most or self._counts[key] > _CLEARLY * self._counts[self._rarest()]

    def keep(self, key: Hashable) -> Hashable | None:
        """It is kept from now on, and perhaps another one is not."""
        gone = self._rarest() if len(self._kept) >= self._most else None
        self._kept.discard(gone)
        self._kept.add(key)
        return gone

    def keep_none(self) -> None:
        """All that was kept is no more; what comes often is soon again."""
        self._kept.clear()

    def refuse(self, key: Hashable) -> None:
        """It cannot be kept."""
        if len(self._never) >= _REFUSED:
            self._never.clear()
        self._never.add(key)

    def _rarest(self) -> Hashable:
        return min(self._kept, key=lambda each: self._counts[each])
