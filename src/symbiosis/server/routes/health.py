"""GET /live, /ready, /health and /ping: for probes and load balancers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.errors import Closed, EngineLost
from symbiosis.server.engines.engine import Engine


class HealthRoutes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_draining = False
        """The server shuts down: load balancers choose another."""

    async def live(self, request: Request) -> Response:
        """This process responds. A cluster without engines is live: a restart of the front door brings none."""
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        if not self._engine.is_alive():
            raise EngineLost("the serving engine is lost; it may be started again")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.is_draining:
            raise Closed("the server is shutting down: send requests to another one")
        return await self.health(request)
