"""Best-fit allocator over a range of bytes, with cost-aware eviction. It only does bookkeeping and owns no memory."""

from __future__ import annotations

from collections.abc import Callable

Cost = tuple[int, float]


class ByteAllocator:
    """At most one allocation per owner. Allocations never overlap."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocations: dict[str, tuple[int, int]] = {}  # offset and size by owner

    @property
    def used(self) -> int:
        return sum(size for _, size in self._allocations.values())

    def __contains__(self, owner: str) -> bool:
        return owner in self._allocations

    def __len__(self) -> int:
        return len(self._allocations)

    def allocate(self, owner: str, size: int) -> int | None:
        """The offset of a new allocation in the smallest gap that fits; None if no gap does."""
        assert owner not in self._allocations, f"{owner} has an allocation already"
        gaps, end = [], 0
        for offset, length, _ in (*self._by_offset(), (self.size, 0, "")):
            gaps.append((offset - end, end))
            end = offset + length
        _, start = min((gap for gap in gaps if gap[0] >= size), default=(0, None))
        if start is not None:
            self._allocations[owner] = (start, size)
        return start

    def free(self, owner: str) -> None:
        del self._allocations[owner]

    def _by_offset(self) -> list[tuple[int, int, str]]:
        return sorted((*allocation, owner) for owner, allocation in self._allocations.items())

    def select_victims(self, size: int, cost: Callable[[str], Cost | None]) -> list[str] | None:
        """The owners to evict so that `size` contiguous bytes are free; empty if they are free now.

        Evicts the contiguous run with the smallest maximum cost. An owner whose cost is None stays. Returns None if no
        run qualifies. With allocations of one size and ages as costs this is LRU.
        """
        best: tuple[Cost, int, list[str]] | None = None
        allocations = self._by_offset()
        costs = [cost(owner) for _, _, owner in allocations]
        ends = [0, *(offset + length for offset, length, _ in allocations)]
        starts = [*(offset for offset, _, _ in allocations), self.size]
        for first, begin in enumerate(ends):
            max_cost: Cost = (-1, 0.0)
            for last in range(first, len(ends)):
                if starts[last] - begin >= size:
                    run = (max_cost, last - first, [owner for _, _, owner in allocations[first:last]])
                    best = min(best, run, key=lambda each: each[:2]) if best is not None else run
                    break
                next_cost = costs[last] if last < len(costs) else None
                if next_cost is None or (best is not None and next_cost > best[0]):
                    break
                max_cost = max(max_cost, next_cost)
        return None if best is None else best[2]

    def check_integrity(self) -> None:
        """Asserts that allocations do not overlap."""
        end = 0
        for offset, length, owner in self._by_offset():
            assert offset >= end, f"{owner} overlaps"
            end = offset + length
        assert end <= self.size
