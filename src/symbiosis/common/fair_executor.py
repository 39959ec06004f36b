"""A worker thread that serves tenants round-robin, and the per-key locks it uses. For one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

_T = TypeVar("_T")


class KeyedLocks:
    """`async with locks.of(key)`: FIFO per key. A lock exists only while it is referenced, so keys cannot grow memory."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: Hashable) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._locks)


class FairExecutor:
    """One thread. Each tenant has at most one call in its queue, so tenants are served round-robin."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.tenant_locks = KeyedLocks()

    async def run(self, tenant: str, call: Callable[[], _T]) -> _T:
        async with self.tenant_locks.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Does not wait; queued calls are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
