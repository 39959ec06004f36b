"""Host tier of the adapter cache: packed adapters in (pinned) host memory, ready to be copied to a GPU."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from torch import Tensor

from symbiosis.serving.lora.byte_allocator import ByteAllocator, Cost
from symbiosis.serving.lora.packed_adapter import PackedAdapter


class HostPool:
    """One range of memory with LRU eviction. Thread-safe.

    A reference keeps an adapter in the pool: `acquire` and `put` take one, `release` returns it. A pool without memory
    stores nothing; a device that computes in host memory uses such a pool.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._allocator = memory, ByteAllocator(memory.numel())
        self._stored: OrderedDict[str, PackedAdapter] = OrderedDict()  # least recently used first
        self._references: Counter[str] = Counter()
        self._dropped: set[str] = set()  # freed with the last reference
        self._lock = threading.Lock()
        self.size = memory.numel()
        self.evictions = 0

    @property
    def used(self) -> int:
        return self._allocator.used

    def acquire(self, hash: str) -> PackedAdapter | None:
        """The stored adapter with a new reference; None if it is not stored."""
        with self._lock:
            return self._acquire(hash)

    def _acquire(self, hash: str) -> PackedAdapter | None:
        packed = self._stored.get(hash)
        if packed is not None:
            self._stored.move_to_end(hash)
            self._references[hash] += 1
        return packed

    def put(self, packed: PackedAdapter) -> PackedAdapter:
        """Store an adapter and return it with a new reference. Returns `packed` itself if the pool has no free space."""
        hash = packed.adapter.hash
        with self._lock:
            self._dropped.discard(hash)
            stored = self._acquire(hash)
            offset = None if stored is not None else self._allocate(hash, packed.nbytes)
        if stored is not None or offset is None:
            return stored or packed
        target = self._memory[offset : offset + packed.nbytes]
        target.copy_(packed.memory)  # without the lock: it may be large
        with self._lock:
            self._stored[hash] = packed.rebase(target)
            self._references[hash] = 1
            return self._stored[hash]

    def release(self, packed: PackedAdapter) -> None:
        """Return a reference. Does nothing for an adapter that the pool did not store."""
        with self._lock:
            hash = packed.adapter.hash
            if self._stored.get(hash) is not packed:
                return
            self._references[hash] -= 1
            if not self._references[hash]:
                del self._references[hash]
                if hash in self._dropped:
                    self._remove(hash)

    def drop(self, hash: str) -> None:
        """Free an adapter's memory now or with its last reference."""
        with self._lock:
            if hash in self._stored and not self._references[hash]:
                self._remove(hash)
            elif hash in self._allocator:
                self._dropped.add(hash)

    def __contains__(self, hash: str) -> bool:
        return hash in self._stored

    def hashes(self) -> set[str]:
        with self._lock:
            return set(self._stored)

    def _allocate(self, hash: str, nbytes: int) -> int | None:
        if hash in self._allocator:  # another thread is copying it
            return None
        ages = {stored: age for age, stored in enumerate(self._stored)}

        def cost(owner: str) -> Cost | None:
            return None if owner not in ages or self._references[owner] else (0, ages[owner])

        victims = self._allocator.select_victims(nbytes, cost)
        if victims is None:
            return None
        for victim in victims:
            self._remove(victim)
        self.evictions += len(victims)
        return self._allocator.allocate(hash, nbytes)

    def _remove(self, hash: str) -> None:
        del self._stored[hash]
        self._dropped.discard(hash)
        self._allocator.free(hash)

    def check_integrity(self) -> None:
        with self._lock:
            self._allocator.check_integrity()
            assert set(self._references) <= set(self._stored)
            assert all(hash in self._allocator for hash in self._stored)
