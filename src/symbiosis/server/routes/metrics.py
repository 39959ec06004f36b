"""GET /metrics."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from symbiosis.server.engine_client import EngineClient
from symbiosis.server.job_service import JobService
from symbiosis.server.metrics.prometheus import render
from symbiosis.server.metrics.reporter import MetricsReporter


class MetricsRoute:
    def __init__(self, engine: EngineClient, reporter: MetricsReporter, jobs: JobService) -> None:
        self._engine, self._reporter, self._jobs = engine, reporter, jobs

    async def get(self, request: Request) -> Response:
        is_alive = self._engine.is_alive()
        sums = await self._reporter.sums() if is_alive else []
        stats = await self._engine.ask("stats") if is_alive else None
        jobs = await asyncio.to_thread(self._jobs.db.count_by_state)
        return Response(render(sums, stats, jobs), media_type=CONTENT_TYPE_PLAIN_0_0_4)
