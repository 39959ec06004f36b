"""Admission of a request by the rate limits, which the engine process owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from symbiosis.server.engines.engine import Engine
from symbiosis.server.rate_limits import RequestLimits


class RequestGate:
    """One per HTTP process. Without limits, nothing is asked."""

    def __init__(self, engine: Engine, limits: RequestLimits) -> None:
        self._engine, self._is_open = engine, limits.is_unlimited

    @asynccontextmanager
    async def limit(self, tenant: str) -> AsyncIterator[None]:
        """Holds one request's place. Raises `TooManyRequests` with the time to retry."""
        if self._is_open:
            yield
            return
        id = await self._engine.acquire(tenant)
        try:
            yield
        finally:
            await asyncio.shield(self._engine.release(id))
