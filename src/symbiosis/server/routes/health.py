"""GET /health and /ping."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.errors import EngineLost
from symbiosis.server.engines.engine import Engine


class HealthRoute:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def get(self, request: Request) -> Response:
        if not self._engine.is_alive():
            raise EngineLost("the serving engine is lost; it may be started again")
        return JSONResponse({"status": "ok"})
