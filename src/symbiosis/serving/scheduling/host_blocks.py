"""Host blocks: a second tier of the prefix cache, in host memory. Pure bookkeeping, as the block manager.

A cached block whose memory on the device is needed is copied to a host block. A sequence that begins with the same tokens,
such as a preempted one that resumes, gets a device block with a copy of it instead of computing the tokens again. Host
blocks are found by the same content hashes, and evicted in LRU order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

BlockTransfer = tuple[int, int]
"""(source, destination): one is a block of the device, the other a host block."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies before a step writes to the device. All of `stores` are read before any of `restores` is written."""

    stores: list[BlockTransfer] = field(default_factory=list)
    """Device to host, in this order: a later one may replace an earlier one."""
    restores: list[BlockTransfer] = field(default_factory=list)
    """Host to device."""


class HostBlocks:
    """`num_blocks` blocks of host memory; 0: none."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.is_worthwhile = True
        """Whether a copy takes less time than computing a block's tokens. Set by the engine."""
        self.num_stored = 0
        """Blocks copied to host memory so far."""
        self.num_restored = 0
        """Blocks copied back so far."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pinned: set[bytes] = set()  # sources of pending transfers
        self._pending = Transfers()

    @property
    def num_used(self) -> int:
        return len(self._cached)

    def has(self, hash: bytes) -> bool:
        """Whether a block can be restored, and should be."""
        return self.is_worthwhile and hash in self._cached

    def find(self, hash: bytes) -> int | None:
        """The place of a block, for a read before the next step."""
        return self._cached.get(hash)

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Keep these blocks until the pending transfers are taken."""
        self._pinned.update(hashes)

    def store(self, hash: bytes, block: int) -> None:
        """The content of a device block is about to be overwritten: copy it, if there is a place and it pays."""
        if hash in self._cached:
            self._cached.move_to_end(hash)
            return
        if not self.is_worthwhile:
            return
        place = self._free.pop() if self._free else self._evict()
        if place is not None:
            self._cached[hash] = place
            self._pending.stores.append((block, place))
            self.num_stored += 1

    def restore(self, hash: bytes, block: int) -> None:
        """Copy a host block to a device block. It stays in host memory too."""
        assert hash in self._pinned, "pinned before device blocks were taken"
        self._cached.move_to_end(hash)
        self._pending.restores.append((self._cached[hash], block))
        self.num_restored += 1

    def is_restoring(self, block: int) -> bool:
        """Whether a pending transfer writes this device block."""
        return any(target == block for _, target in self._pending.restores)

    def take_transfers(self) -> Transfers:
        """The transfers to make now, before anything else is written."""
        taken, self._pending = self._pending, Transfers()
        self._pinned.clear()
        return taken

    def clear(self) -> None:
        """Forget all blocks and pending transfers."""
        self._free, self._pending = list(range(self.num_blocks - 1, -1, -1)), Transfers()
        self._cached.clear()
        self._pinned.clear()

    def check_integrity(self) -> None:
        """Assert that each block is free or cached, and that no device block is restored twice."""
        used = list(self._cached.values())
        assert sorted([*self._free, *used]) == list(range(self.num_blocks)), "a host block is lost"
        assert self._pinned <= self._cached.keys()
        restored = [target for _, target in self._pending.restores]
        assert len(set(restored)) == len(restored)

    def _evict(self) -> int | None:
        """The place of the least recently used block that no pending transfer reads; None if there is none."""
        for hash in self._cached:
            if hash not in self._pinned:
                return self._cached.pop(hash)
        return None
