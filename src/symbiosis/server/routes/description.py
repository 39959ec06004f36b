"""GET /version and /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.server.openapi import describe_routes
from symbiosis.server.requests.body import Handler
from symbiosis.version import VERSION


class DescriptionRoutes:
    def __init__(self, table: Sequence[tuple[str, str, Handler]]) -> None:
        """`table`: method, path and handler of every route, read at the first request."""
        self._table = table

    @cached_property
    def _document(self) -> dict[str, object]:
        return describe_routes([(method, path) for method, path, _ in self._table])

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)
