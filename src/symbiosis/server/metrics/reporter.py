"""Sends what this HTTP process counted to the engine process: several times a second, and when it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.server.engines.engine import Engine
from symbiosis.server.engines.rpc_client import Inbox
from symbiosis.server.metrics.counts import Metrics

_INTERVAL_S = 0.25
CountJobs = Callable[[], Awaitable[list[tuple[str, str, int]]]]


class MetricsReporter:
    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._task: asyncio.Task[None] | None = None

    def start(self, count_jobs: CountJobs | None = None) -> None:
        """`count_jobs` is that of the process with the jobs: tenant, state and number of jobs."""
        self._task = asyncio.create_task(self._run(count_jobs))

    async def _run(self, count_jobs: CountJobs | None) -> None:
        inbox = Inbox()
        id = await self._engine.open({"op": "report"}, inbox)
        while True:
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    requests = await inbox.take()
            except TimeoutError:
                await self.send()
                continue
            if None in requests:  # the engine is lost
                return
            if any("refused" in request for request in requests):  # a director is lost, and another one comes
                self._engine.forget(id)
                id = await self._engine.open({"op": "report"}, inbox)
                continue
            flush: dict[str, Any] = {"flush": max(request["flush"] for request in requests)}
            if count_jobs is not None:
                with suppress(SymbiosisError):  # a full disk: the numbers of the last time stay
                    flush["jobs"] = await count_jobs()
            await self._send(**flush)

    async def send(self) -> None:
        """Send what was counted since the last time."""
        await self._send()

    async def _send(self, **more: Any) -> None:
        counted = self._metrics.take()
        if counted or more:
            await self._engine.send({"op": "count", "id": "0", "counted": counted, **more})

    async def stop(self) -> None:
        """Reply to no further request."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
