"""GET /health, /ping and /metrics."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.errors import EngineLost
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.job_service import JobService
from symbiosis.server.metrics import Metrics


class MonitoringRoutes:
    def __init__(self, engine: EngineClient, metrics: Metrics, jobs: JobService) -> None:
        self._engine, self._metrics, self._jobs = engine, metrics, jobs

    async def health(self, request: Request) -> Response:
        if not self._engine.is_alive():
            raise EngineLost("the serving engine is lost; it may be started again")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        stats = await self._engine.ask("stats") if self._engine.is_alive() else None
        jobs = await asyncio.to_thread(self._jobs.db.count_by_state)
        return Response(self._metrics.render(stats, jobs), media_type=CONTENT_TYPE_PLAIN_0_0_4)
