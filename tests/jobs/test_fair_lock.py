"""One at a time, by tenants in turn, whoever goes away."""

from __future__ import annotations

import asyncio

from symbiosis.jobs.fair_lock import FairLock


def test_tenants_take_turns():
    async def play() -> list[str]:
        turn, had = FairLock(), list[str]()

        async def use(tenant: str) -> None:
            async with turn.of(tenant):
                had.append(tenant)
                await asyncio.sleep(0)

        await asyncio.gather(*(use(tenant) for tenant in ("ann", "ann", "ann", "bob", "bob", "eve")))
        await use("ann")  # nobody has it
        return had

    assert asyncio.run(play()) == ["ann", "ann", "bob", "eve", "ann", "bob", "ann"]


def test_who_goes_away_takes_no_turn_and_keeps_none():
    async def play() -> list[str]:
        turn, had = FairLock(), list[str]()
        hold = asyncio.Event()

        async def use(name: str) -> None:
            async with turn.of(name):
                had.append(name)
                await hold.wait()

        tasks = {name: asyncio.create_task(use(name)) for name in ("first", "waits", "called", "last")}
        await asyncio.sleep(0)
        tasks["waits"].cancel()
        await asyncio.sleep(0)
        tasks["first"].cancel()  # its turn is given to "called", which
        await asyncio.sleep(0)
        tasks["called"].cancel()  # goes away before or after it wakes
        hold.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        async with turn.of("later"):
            had.append("later")
        return had

    had = asyncio.run(asyncio.wait_for(play(), 10))
    assert had[0] == "first"
    assert had[-2:] == ["last", "later"]
    assert "waits" not in had
