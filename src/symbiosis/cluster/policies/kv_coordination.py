"""KV coordination: where the keys and values of a prompt's prefix are, and whether to compute or to copy them.

BlockLLM's rule: the owner of the KV cache first, if it has room; otherwise the engine with the least
T_queue + T_compute + T_transfer + T_load. A transfer is met in the middle: the target computes from the front while it copies
from the back, until the two meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvMove:
    """How a prefix of tokens comes to another engine."""

    computed: int
    """Tokens from the front that the target computes."""
    copied: int
    """Tokens from the back that it copies."""
    seconds: float


def meet_in_the_middle(tokens: int, *, compute_s: float, copy_s: float, start_s: float = 0.0) -> KvMove:
    """`compute_s` and `copy_s` are seconds per token; the first copied token arrives after `start_s`."""
    if tokens <= 0:
        return KvMove(0, 0, 0.0)
    if copy_s <= 0 and compute_s <= 0:
        return KvMove(0, tokens, start_s)
    # computed × compute_s = start_s + (tokens − computed) × copy_s
    computed = min(tokens, max(0, round((start_s + tokens * copy_s) / (compute_s + copy_s))))
    copied = tokens - computed
    return KvMove(computed, copied, max(computed * compute_s, start_s + copied * copy_s if copied else 0.0))


def load_s(swap_s: float, transfer_s: float, *, idle: bool) -> float:
    """T_load: on an idle device the adapter loads during the transfer, otherwise after it."""
    return max(swap_s - transfer_s, 0.0) if idle else swap_s


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One engine that could take a request, with the terms of its delay in seconds."""

    engine: int
    queue_s: float
    compute_s: float
    transfer_s: float
    swap_s: float
    """Load of the adapter, 0 if it is resident."""
    idle: bool
    owns: bool = False
    """Whether it holds the KV cache of the request."""
    fits: bool = True
    """Whether its KV cache has room."""

    @property
    def seconds(self) -> float:
        load = load_s(self.swap_s, self.transfer_s, idle=self.idle)
        return self.queue_s + self.compute_s + self.transfer_s + load


def choose_dispatch(options: Iterable[Dispatch]) -> Dispatch | None:
    """The owner if it has room, the least delay otherwise; ties to the lowest number. None if none has room."""
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: (not option.owns, option.seconds, option.engine), default=None)


def copy_order(blocks: Sequence[tuple[int, int, float]]) -> list[int]:
    """Blocks (number, shared references, time of resume) in the order they migrate: fewest references, earliest resume."""
    return [number for number, _, _ in sorted(blocks, key=lambda block: (block[1], block[2], block[0]))]


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
