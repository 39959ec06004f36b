"""Adapters in host memory, ready to be copied to a GPU."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from torch import Tensor

from symbiosis.serving.lora.byte_allocator import ByteAllocator, Cost
from symbiosis.serving.lora.packed_adapter import PackedAdapter


class NullHostPool:
    """For a device that computes in host memory: nothing is kept twice. Also what every host does, for any thread."""

    size: int | None = None
    """Most bytes; None: nothing has to fit."""
    used = 0
    evictions = 0

    def hold(self, hash: str) -> PackedAdapter | None:
        """The adapter, if it is here; it stays until released."""
        return None

    def put(self, hash: str, flat: PackedAdapter) -> PackedAdapter:
        """Keep an adapter, and hold it. If there is no room, it is held where it was."""
        return flat

    def release(self, flat: PackedAdapter) -> None:
        """Whoever held it has done with it."""

    def drop(self, hash: str) -> None:
        """Nobody will ask for it again: its memory is free as soon as nobody holds it."""

    def has(self, hash: str) -> bool:
        """Whether it need not be read, as far as is known now."""
        return False

    def hashes(self) -> set[str]:
        return set()


class HostPool(NullHostPool):
    """One range of (pinned) memory, least recently used out first."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._arena = memory, ByteAllocator(memory.numel())
        self._kept: OrderedDict[str, PackedAdapter] = OrderedDict()  # longest not used first
        self._holds: Counter[str] = Counter()
        self._dropped: set[str] = set()  # as soon as nobody holds it
        self._lock = threading.Lock()
        self.size = memory.numel()

    @property
    def used(self) -> int:  # type: ignore[override]
        return self._arena.used

    def hold(self, hash: str) -> PackedAdapter | None:
        with self._lock:
            return self._hold(hash)

    def _hold(self, hash: str) -> PackedAdapter | None:
        flat = self._kept.get(hash)
        if flat is not None:
            self._kept.move_to_end(hash)
            self._holds[hash] += 1
        return flat

    def put(self, hash: str, flat: PackedAdapter) -> PackedAdapter:
        with self._lock:
            self._dropped.discard(hash)
            kept = self._hold(hash)
            offset = None if kept is not None else self._make_room(hash, flat.size)
        if kept is not None or offset is None:
            return kept or flat
        target = self._memory[offset : offset + flat.size]
        target.copy_(flat.memory)  # not under the lock: it may be large
        with self._lock:
            self._kept[hash] = flat.at(target)
            self._holds[hash] = 1
            return self._kept[hash]

    def release(self, flat: PackedAdapter) -> None:
        with self._lock:
            hash = flat.loaded.hash
            if self._kept.get(hash) is not flat:
                return  # it was held where it was
            self._holds[hash] -= 1
            if not self._holds[hash]:
                del self._holds[hash]
                if hash in self._dropped:
                    self._remove(hash)

    def drop(self, hash: str) -> None:
        with self._lock:
            if hash in self._kept and not self._holds[hash]:
                self._remove(hash)
            elif hash in self._arena:
                self._dropped.add(hash)

    def has(self, hash: str) -> bool:
        return hash in self._kept

    def hashes(self) -> set[str]:
        with self._lock:
            return set(self._kept)

    def _make_room(self, hash: str, size: int) -> int | None:
        if hash in self._arena:  # another thread is just copying it
            return None
        ages = {kept: age for age, kept in enumerate(self._kept)}

        def cost(owner: str) -> Cost | None:
            return None if owner not in ages or self._holds[owner] else (0, ages[owner])

        leaving = self._arena.cheapest(size, cost)
        if leaving is None:
            return None
        for other in leaving:
            self._remove(other)
        self.evictions += len(leaving)
        return self._arena.take(hash, size)

    def _remove(self, hash: str) -> None:
        del self._kept[hash]
        self._dropped.discard(hash)
        self._arena.give(hash)

    def check_integrity(self) -> None:
        with self._lock:
            self._arena.check_integrity()
            assert set(self._holds) <= set(self._kept)
            assert all(hash in self._arena for hash in self._kept)
