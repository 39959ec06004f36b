"""FairLock: one holder at a time, tenants round-robin, cancelled waiters skipped."""

from __future__ import annotations

import asyncio

from symbiosis.common.async_locks import FairLock


def test_tenants_are_served_round_robin():
    async def play() -> list[str]:
        lock, had = FairLock(), list[str]()

        async def use(tenant: str) -> None:
            async with lock.acquire(tenant):
                had.append(tenant)
                await asyncio.sleep(0)

        await asyncio.gather(*(use(tenant) for tenant in ("ann", "ann", "ann", "bob", "bob", "eve")))
        await use("ann")  # the lock is free
        return had

    assert asyncio.run(play()) == ["ann", "ann", "bob", "eve", "ann", "bob", "ann"]


def test_a_cancelled_waiter_neither_takes_nor_holds_the_lock():
    async def play() -> list[str]:
        lock, had = FairLock(), list[str]()
        hold = asyncio.Event()

        async def use(name: str) -> None:
            async with lock.acquire(name):
                had.append(name)
                await hold.wait()

        tasks = {name: asyncio.create_task(use(name)) for name in ("first", "waits", "called", "last")}
        await asyncio.sleep(0)
        tasks["waits"].cancel()
        await asyncio.sleep(0)
        tasks["first"].cancel()  # hands the lock over to "called", which
        await asyncio.sleep(0)
        tasks["called"].cancel()  # is cancelled before or after it wakes
        hold.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        async with lock.acquire("later"):
            had.append("later")
        return had

    had = asyncio.run(asyncio.wait_for(play(), 10))
    assert had[0] == "first"
    assert had[-2:] == ["last", "later"]
    assert "waits" not in had
