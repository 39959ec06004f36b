"""Best-fit allocator over a range of bytes, with cost-aware eviction. It only does bookkeeping and owns no memory."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

Cost = tuple[int, float]


class ByteAllocator:
    """At most one allocation per owner. Allocations never overlap."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._by_offset: list[tuple[int, int, str]] = []  # (offset, size, owner), sorted
        self._allocations: dict[str, tuple[int, int]] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._allocations

    def __len__(self) -> int:
        return len(self._allocations)

    def allocate(self, owner: str, size: int) -> int | None:
        """The offset of a new allocation in the smallest gap that fits; None if no gap does."""
        assert owner not in self._allocations, f"{owner} has an allocation already"
        best: tuple[int, int] | None = None
        end = 0
        for offset, length, _ in (*self._by_offset, (self.size, 0, "")):
            gap = offset - end
            if gap >= size and (best is None or gap < best[0]):
                best = (gap, end)
            end = offset + length
        if best is None:
            return None
        allocation = (best[1], size)
        self._by_offset.insert(bisect(self._by_offset, (*allocation, owner)), (*allocation, owner))
        self._allocations[owner] = allocation
        self.used += size
        return best[1]

    def free(self, owner: str) -> None:
        allocation = self._allocations.pop(owner)
        self._by_offset.remove((*allocation, owner))
        self.used -= allocation[1]

    def select_victims(self, size: int, cost: Callable[[str], Cost | None]) -> list[str] | None:
        """The owners to evict so that `size` contiguous bytes are free; empty if they are free now.

        Evicts the contiguous run with the smallest maximum cost. An owner whose cost is None stays. Returns None if no
        run qualifies. With allocations of one size and ages as costs this is LRU.
        """
        best: tuple[Cost, int, list[str]] | None = None
        costs = [cost(owner) for _, _, owner in self._by_offset]
        ends = [0, *(offset + length for offset, length, _ in self._by_offset)]
        starts = [*(offset for offset, _, _ in self._by_offset), self.size]
        for first, begin in enumerate(ends):
            max_cost: Cost = (-1, 0.0)
            for last in range(first, len(ends)):
                if starts[last] - begin >= size:
                    found = (max_cost, last - first, [owner for _, _, owner in self._by_offset[first:last]])
                    best = min(best, found, key=lambda each: each[:2]) if best is not None else found
                    break
                next_cost = costs[last] if last < len(costs) else None
                if next_cost is None or (best is not None and next_cost > best[0]):
                    break
                max_cost = max(max_cost, next_cost)
        return None if best is None else best[2]

    def check_integrity(self) -> None:
        """Asserts that allocations do not overlap and that the totals match."""
        end = 0
        for offset, length, owner in self._by_offset:
            assert offset >= end, f"{owner} overlaps"
            assert self._allocations[owner] == (offset, length)
            end = offset + length
        assert end <= self.size
        assert len(self._by_offset) == len(self._allocations)
        assert self.used == sum(length for _, length in self._allocations.values())
