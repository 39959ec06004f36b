"""One at a time, and of those who wait, their tenants take turns. Used by one event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, the next first."""

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._give()

    async def _wait(self, tenant: str) -> None:
        call = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(call)
        try:
            await call
        except asyncio.CancelledError:
            if call.done() and not call.cancelled():  # it was given the turn, and does not take it
                self._give()
            raise

    def _give(self) -> None:
        """To the next, before anybody who comes now: until then it stays taken."""
        while self._waiting:
            tenant, calls = self._waiting.popitem(last=False)
            call = calls.popleft()
            if calls:
                self._waiting[tenant] = calls
            if not call.done():
                call.set_result(None)
                return
        self._taken = False
