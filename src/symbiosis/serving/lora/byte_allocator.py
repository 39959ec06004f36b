"""Who has which piece of a range of bytes. Pure bookkeeping: the bytes are somebody else's."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

Cost = tuple[int, float]


class ByteAllocator:
    """Pieces by their owners, one each. What is free is what nobody has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._order: list[tuple[int, int, str]] = []  # offset, size, owner; by offset
        self._pieces: dict[str, tuple[int, int]] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def size_of(self, owner: str) -> int:
        return self._pieces[owner][1]

    def take(self, owner: str, size: int) -> int | None:
        """The offset of a new piece, in the smallest gap that it fits into; None if there is none."""
        assert owner not in self._pieces, f"{owner} has a piece already"
        best: tuple[int, int] | None = None
        end = 0
        for offset, length, _ in (*self._order, (self.size, 0, "")):
            gap = offset - end
            if gap >= size and (best is None or gap < best[0]):
                best = (gap, end)
            end = offset + length
        if best is None:
            return None
        piece = (best[1], size)
        self._order.insert(bisect(self._order, (*piece, owner)), (*piece, owner))
        self._pieces[owner] = piece
        self.used += size
        return best[1]

    def give(self, owner: str) -> None:
        """Its piece is free again."""
        piece = self._pieces.pop(owner)
        self._order.remove((*piece, owner))
        self.used -= piece[1]

    def cheapest(self, size: int, cost: Callable[[str], Cost | None]) -> list[str] | None:
        """The owners that would have to leave so that `size` bytes in a row are free; none: they are now.

        Of all runs of neighbours, the one whose dearest is cheapest; None: there is none, since
        owners without a cost stay. With pieces of one size and times as costs that is the least recently used.
        """
        best: tuple[Cost, int, list[str]] | None = None
        costs = [cost(owner) for _, _, owner in self._order]
        ends = [0, *(offset + length for offset, length, _ in self._order)]
        starts = [*(offset for offset, _, _ in self._order), self.size]
        for first, begin in enumerate(ends):
            dearest: Cost = (-1, 0.0)
            for last in range(first, len(ends)):
                if starts[last] - begin >= size:
                    found = (dearest, last - first, [owner for _, _, owner in self._order[first:last]])
                    best = min(best, found, key=lambda each: each[:2]) if best is not None else found
                    break
                price = costs[last] if last < len(costs) else None
                if price is None or (best is not None and price > best[0]):
                    break
                dearest = max(dearest, price)
        return None if best is None else best[2]

    def check_integrity(self) -> None:
        """Pieces do not overlap, and everything adds up."""
        end = 0
        for offset, length, owner in self._order:
            assert offset >= end, f"{owner} overlaps"
            assert self._pieces[owner] == (offset, length)
            end = offset + length
        assert end <= self.size
        assert len(self._order) == len(self._pieces)
        assert self.used == sum(length for _, length in self._pieces.values())
