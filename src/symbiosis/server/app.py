"""Wires the HTTP app: the table of routes, error responses, cancellation and request metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.auth import ApiKeys, AuthMiddleware
from symbiosis.server.cors import allow_origins
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.job_service import JobService
from symbiosis.server.metrics import Metrics
from symbiosis.server.openai.errors import BadRequest, error_response
from symbiosis.server.rate_limits import RateLimiter
from symbiosis.server.requests.body import Handler, cancel_on_disconnect
from symbiosis.server.routes.adapters import AdapterRoutes
from symbiosis.server.routes.completions import CompletionRoutes
from symbiosis.server.routes.description import DescriptionRoutes
from symbiosis.server.routes.files import FileRoutes
from symbiosis.server.routes.fine_tuning import FineTuningRoutes
from symbiosis.server.routes.models import ModelRoutes
from symbiosis.server.routes.monitoring import MonitoringRoutes
from symbiosis.server.routes.tokenization import TokenizationRoutes
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer

_CLIENT_CLOSED_REQUEST = 499


class Server:
    """The app and its shared objects."""

    def __init__(self, engine: EngineClient, tokenizer: ServerTokenizer, settings: Settings) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._metrics = Metrics()
        self._store = AdapterStore(Path(settings.uploads), settings.store_limits)
        self._jobs = JobService(engine, tokenizer, settings, self._store, self._metrics.count_steps)

    def app(self) -> ASGIApp:
        engine, tokenizer, settings = self._engine, self._tokenizer, self._settings
        limiter = RateLimiter(settings.request_limits)
        monitoring = MonitoringRoutes(engine, self._metrics, self._jobs)
        tokenization = TokenizationRoutes(engine, tokenizer, limiter)
        models = ModelRoutes(engine, settings)
        completions = CompletionRoutes(engine, tokenizer, settings, limiter, self._metrics)
        adapters = AdapterRoutes(engine, settings, self._store, self._jobs)
        files = FileRoutes(settings, self._jobs)
        tuning = FineTuningRoutes(engine, settings, self._jobs)
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/health", monitoring.health),
            ("GET", "/ping", monitoring.health),
            ("GET", "/metrics", monitoring.metrics),
            ("POST", "/tokenize", tokenization.tokenize),
            ("POST", "/detokenize", tokenization.detokenize),
            ("GET", "/v1/models", models.list),
            ("GET", "/v1/models/{id:path}", models.get),
            ("DELETE", "/v1/models/{id:path}", adapters.remove_model),
            ("POST", "/v1/completions", completions.complete),
            ("POST", "/v1/chat/completions", completions.chat),
            ("POST", "/v1/embeddings", completions.embed),
            ("GET", "/v1/adapters", adapters.list),
            ("PUT", "/v1/adapters/{name}", adapters.upload),
            ("DELETE", "/v1/adapters/{name}", adapters.remove),
            ("GET", "/v1/adapters/{name}/{file}", adapters.download),
            ("POST", "/v1/files", files.upload),
            ("GET", "/v1/files", files.list),
            ("GET", "/v1/files/{id}", files.get),
            ("DELETE", "/v1/files/{id}", files.remove),
            ("GET", "/v1/files/{id}/content", files.download),
            ("POST", "/v1/fine_tuning/jobs", tuning.create),
            ("GET", "/v1/fine_tuning/jobs", tuning.list),
            ("GET", "/v1/fine_tuning/jobs/{id}", tuning.get),
            ("POST", "/v1/fine_tuning/jobs/{id}/cancel", tuning.cancel),
            ("POST", "/v1/fine_tuning/jobs/{id}/pause", tuning.pause),
            ("POST", "/v1/fine_tuning/jobs/{id}/resume", tuning.resume),
            ("GET", "/v1/fine_tuning/jobs/{id}/events", tuning.list_events),
            ("GET", "/v1/fine_tuning/jobs/{id}/checkpoints", tuning.list_checkpoints),
            ("POST", "/v1/load_lora_adapter", adapters.load),
            ("POST", "/v1/unload_lora_adapter", adapters.unload),
            ("POST", "/v1/pin_lora_adapter", adapters.pin),
        ]
        description = DescriptionRoutes(table)
        table += [("GET", "/version", description.version), ("GET", "/openapi.json", description.openapi)]
        routes = [self._route(*entry) for entry in table]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _routing_error})
        hosts = None if settings.allowed_hosts is None else frozenset(settings.allowed_hosts)
        guard = AuthMiddleware(app, ApiKeys(settings.keys, settings.admin_key), hosts, settings.cors_origins)
        return allow_origins(guard, settings.cors_origins)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._engine.start()
        await self._jobs.open()
        yield
        await self._jobs.close()
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
                self._metrics.count_request(path, status, time.monotonic() - started)
            return response

        return Route(path, endpoint, methods=[method])


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: an unknown path, or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    message = f"there is no {path}" if status == 404 else f"{path} does not support {request.method}"
    return error_response(BadRequest(message, code="not_found" if status == 404 else "method_not_allowed", status=status))
