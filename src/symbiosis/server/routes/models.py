"""GET /v1/models: the base model, or several models, and the adapters that a tenant may use."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.adapters.names import qualify_name
from symbiosis.server.engines.engine import Engine
from symbiosis.server.model_names import ModelNames
from symbiosis.server.openai.errors import unknown_model
from symbiosis.server.routes.adapters import visible_adapters
from symbiosis.server.settings import Settings


class ModelRoutes:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._base = engine, settings.base
        self._names = ModelNames(settings.base, settings.hub_id, settings.models)
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*(await self._models(request)).values()]})

    async def get(self, request: Request) -> Response:
        id = request.path_params["id"]
        found = (await self._models(request)).get(self._names.parse(id))
        if found is None:
            raise unknown_model(id)
        return JSONResponse({**found, "id": id})

    async def _models(self, request: Request) -> dict[str | None, dict[str, Any]]:
        """By name; None is the base model, or the default of several."""
        stats = await self._engine.ask("stats")
        common = {"object": "model", "created": self._created, "owned_by": "symbiosis", "max_model_len": stats["max_model_len"]}
        adapters = visible_adapters(request.state.caller, stats["adapters"])
        parents, others = stats.get("adapter_models", {}), sorted(stats.get("models", {}).keys() - {self._base})
        return {
            None: {"id": self._base, "root": self._base, "parent": None, **common},
            **{name: {"id": name, "root": name, "parent": None, **common} for name in others},
            **{
                name: {"id": name, "root": hash, "parent": parents.get(qualify_name(owner, name), self._base), **common}
                for name, (owner, hash) in sorted(adapters.items())
            },
        }
