"""GET /metrics and /v1/statistics: the engine process's statistics as Prometheus text and as JSON."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.server.engines.engine import Engine
from symbiosis.server.metrics.prometheus import render


class StatisticsRoutes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def metrics(self, request: Request) -> Response:
        statistics = await self._engine.ask("statistics") if self._engine.is_alive() else None
        return Response(render(statistics), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def get(self, request: Request) -> Response:
        return JSONResponse(await self._engine.ask("statistics"))
