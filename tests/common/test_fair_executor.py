"""FairExecutor serves tenants round-robin; cancelled calls block no other."""

from __future__ import annotations

import asyncio
import threading

from symbiosis.common.fair_executor import FairExecutor


def test_tenants_are_served_round_robin():
    async def play() -> list[str]:
        executor, served = FairExecutor("test"), list[str]()
        tenants = ("ann", "ann", "ann", "bob", "bob", "eve")
        await asyncio.gather(*(executor.run(tenant, lambda tenant=tenant: served.append(tenant)) for tenant in tenants))
        await executor.run("ann", lambda: served.append("ann"))
        assert not executor.tenant_locks, "locks are freed"
        executor.close()
        return served

    assert asyncio.run(play()) == ["ann", "bob", "eve", "ann", "bob", "ann", "ann"]


def test_a_cancelled_call_neither_runs_nor_blocks_others():
    async def play() -> list[str]:
        executor, served, hold = FairExecutor("test"), list[str](), threading.Event()

        def serve(name: str) -> None:
            served.append(name)
            hold.wait(10)

        calls = {
            name: asyncio.create_task(executor.run(name[0], lambda name=name: serve(name))) for name in ("a1", "a2", "b1", "c1")
        }
        while not served:
            await asyncio.sleep(0.001)
        for name in ("a1", "a2", "b1"):  # running, waiting for the lock of its tenant, in the queue of the thread
            calls[name].cancel()
            await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(*calls.values(), return_exceptions=True)
        await executor.run("a", lambda: served.append("later"))
        executor.close()
        return served

    assert asyncio.run(asyncio.wait_for(play(), 10)) == ["a1", "c1", "later"]
