"""RPC handler for rate limits: one owner for all HTTP processes."""

from __future__ import annotations

from typing import Any

from symbiosis.errors import Closed
from symbiosis.server.rate_limits import RateLimiter, RequestLimits
from symbiosis.serving.engine_messages import Result, text_field
from symbiosis.serving.rpc_server import RpcServer


class RateLimitService:
    """Holds a place from `acquire` until `release`, or until the peer is lost."""

    operations = ("acquire", "release")

    def __init__(self, rpc: RpcServer, limits: RequestLimits) -> None:
        self._rpc, self._limiter = rpc, RateLimiter(limits)
        self._tenants: dict[str, str] = {}  # by id of the place
        self._is_closed = False
        rpc.add_handler(self)

    def handle(self, id: str, body: dict[str, Any]) -> None:
        if body.get("op") == "release":
            self._release(id)
            return
        if self._is_closed:
            raise Closed("this server is shutting down")
        tenant = text_field(body, "tenant") if body.get("tenant") else ""
        self._limiter.acquire(tenant)
        self._tenants[id] = tenant
        self._rpc.publish([Result(id, {})])

    def _release(self, id: str) -> None:
        tenant = self._tenants.pop(id, None)
        if tenant is not None:
            self._limiter.release(tenant)

    def drop_peer(self, peer: str) -> None:
        for id in [id for id in self._tenants if id.startswith(f"{peer}:")]:
            self._release(id)

    def close(self) -> None:
        self._is_closed = True
