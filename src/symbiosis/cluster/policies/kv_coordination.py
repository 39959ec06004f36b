"""KV coordination: which engines have the keys and values of a prompt's prefix.

An engine that has not, fetches them from one that has (`serving.block_exchange`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PlacedBlocks:
    """The prefix caches of engines, as far as placements tell: the blocks of the last prompts placed on each.

    An engine's cache has less room than this, since sequences that run take blocks too: what was used least recently may be
    gone from it. Then the prompt is computed there as it would be elsewhere.
    """

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks` of each engine."""
        self._max_blocks = max_blocks
        self._held: dict[int, OrderedDict[int, None]] = {}

    def add(self, number: int, blocks: Sequence[int]) -> list[int]:
        """A prompt with these blocks goes to an engine; the blocks that left its cache."""
        held = self._held.setdefault(number, OrderedDict())
        for block in reversed(blocks):  # the end of a prompt leaves first: it is useless without the beginning
            held.pop(block, None)
            held[block] = None
        return [held.popitem(last=False)[0] for _ in range(len(held) - self._max_blocks)]

    def drop_engine(self, number: int) -> None:
        """It has left, or another has its number now."""
        self._held.pop(number, None)


class KvDirectory:
    """Which engines hold which blocks of prompts. Bounded: the oldest blocks are forgotten."""

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        self._max_blocks = max_blocks
        self._owners: OrderedDict[int, int] = OrderedDict()

    def add(self, number: int, blocks: Iterable[int]) -> None:
        """An engine has these blocks in its prefix cache."""
        owners, bit = self._owners, 1 << number
        for block in blocks:
            owners[block] = owners.pop(block, 0) | bit
        while len(owners) > self._max_blocks:
            owners.popitem(last=False)

    def evict(self, number: int, blocks: Iterable[int]) -> None:
        """An engine has these blocks no more."""
        owners, bit = self._owners, 1 << number
        for block in blocks:
            left = owners.get(block, 0) & ~bit
            if left:
                owners[block] = left
            else:
                owners.pop(block, None)

    def drop_engine(self, number: int) -> None:
        """The engine has left. Takes time in the number of blocks."""
        bit = 1 << number
        for block in [block for block, mask in self._owners.items() if mask & bit]:
            self.evict(number, (block,))

    def find_owners(self, blocks: Sequence[int], candidates: int) -> tuple[int, int]:
        """The candidates with the longest prefix of blocks, as a mask, and the number of these blocks."""
        owners, mask, length = self._owners, candidates, 0
        for block in blocks:
            left = owners.get(block, 0) & mask
            if not left:
                break
            mask, length = left, length + 1
        return (mask, length) if length else (0, 0)
