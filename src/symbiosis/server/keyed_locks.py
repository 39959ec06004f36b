"""A lock for each of many names, which is there as long as somebody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from weakref import WeakValueDictionary


class KeyedLocks:
    """`async with locks.of(name)`: one at a time, in the order they came; who needs another name does not wait."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: Hashable) -> asyncio.Lock:
        return self._held.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._held)
