"""Sends what this HTTP process counted to the engine process, which sums it over all processes."""

from __future__ import annotations

import asyncio
from typing import Any

from symbiosis.server.engine_client import EngineClient
from symbiosis.server.metrics.counts import Metrics

_INTERVAL_S = 0.25


class MetricsReporter:
    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.send()

    async def send(self) -> None:
        if counted := self._metrics.take():
            await self._engine.send({"op": "count", "id": "0", "counted": counted})

    async def sums(self) -> list[Any]:
        """Over all processes, with all that this one has counted."""
        await self.send()
        return list((await self._engine.ask("metrics"))["sums"])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self.send()
