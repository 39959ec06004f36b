"""Wires the HTTP app: the table of routes, error responses, cancellation and request metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from symbiosis.server.auth import ApiKeys, AuthMiddleware
from symbiosis.server.connections.control_proxy import ControlProxy
from symbiosis.server.control import Control
from symbiosis.server.cors import allow_origins
from symbiosis.server.engines.engine import Engine
from symbiosis.server.metrics.counts import Metrics
from symbiosis.server.metrics.reporter import MetricsReporter
from symbiosis.server.openai.errors import BadRequest, error_response, no_such_path
from symbiosis.server.request_gate import RequestGate
from symbiosis.server.requests.body import Handler, cancel_on_disconnect
from symbiosis.server.routes.completions import CompletionRoutes
from symbiosis.server.routes.health import HealthRoutes
from symbiosis.server.routes.tokenization import TokenizationRoutes
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer

_CLIENT_CLOSED_REQUEST = 499


class Server:
    """The app of one HTTP process and its shared objects.

    Completions are served by every process. `control` is the socket of the control process, which gets all other requests;
    None: this is the control process.
    """

    def __init__(self, engine: Engine, tokenizer: ServerTokenizer, settings: Settings, control: str | None = None) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._health = HealthRoutes(engine)
        self._metrics = Metrics()
        self._reporter = MetricsReporter(engine, self._metrics)
        self._proxy = None if control is None else ControlProxy(control)
        self._control: Control | None = None
        if control is None:
            self._control = Control(engine, tokenizer, settings, self._metrics)

    def app(self) -> ASGIApp:
        engine, tokenizer, settings = self._engine, self._tokenizer, self._settings
        gate = RequestGate(engine, settings.request_limits)
        completions = CompletionRoutes(engine, tokenizer, settings, gate, self._metrics)
        tokenization = TokenizationRoutes(engine, tokenizer, gate)
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/live", self._health.live),
            ("GET", "/ready", self._health.ready),
            ("GET", "/health", self._health.health),
            ("GET", "/ping", self._health.health),
            ("POST", "/tokenize", tokenization.tokenize),
            ("POST", "/detokenize", tokenization.detokenize),
            ("POST", "/v1/completions", completions.complete),
            ("POST", "/v1/chat/completions", completions.chat),
            ("POST", "/v1/embeddings", completions.embed),
            *(self._control.table() if self._control is not None else ()),
        ]
        if self._control is not None:
            table += self._control.describe(table)
        routes: list[BaseRoute] = [self._route(*entry) for entry in table]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _routing_error})
        if self._proxy is not None:
            app.router.default = self._proxy
        hosts = None if settings.allowed_hosts is None else frozenset(settings.allowed_hosts)
        guard = AuthMiddleware(app, ApiKeys(settings.keys, settings.admin_key), hosts, settings.cors_origins)
        return allow_origins(guard, settings.cors_origins)

    def drain(self) -> None:
        """Not ready from now on; requests are served as before."""
        self._health.is_draining = True

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._engine.start()
        if self._control is not None:
            await self._control.open()
        self._reporter.start(None if self._control is None else self._control.count_jobs)
        yield
        await self._reporter.stop()
        if self._control is not None:
            await self._control.close()
        await self._reporter.send()
        await self._engine.close()

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        """A handler whose errors become responses, which is cancelled on disconnect and counted."""

        async def endpoint(request: Request) -> Response:
            started, status = time.monotonic(), _CLIENT_CLOSED_REQUEST
            request.state.timeout_s = self._settings.client_timeout_s
            try:
                response = await cancel_on_disconnect(request, handler)
                status = response.status_code
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_CLOSED_REQUEST)
            except Exception as error:  # noqa: BLE001 - mapped, and logged if it is internal
                response = error_response(error)
                status = response.status_code
            finally:
                caller = getattr(request.state, "caller", None)
                tenant = None if caller is None else caller.tenant
                self._metrics.count_request(path, status, time.monotonic() - started, tenant)
            return response

        return Route(path, endpoint, methods=[method])


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: an unknown path, or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    message = no_such_path(path) if status == 404 else f"{path} does not support {request.method}"
    return error_response(BadRequest(message, code="not_found" if status == 404 else "method_not_allowed", status=status))
