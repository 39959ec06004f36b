"""Authentication and authorization. Deny by default: a path that is not listed here needs the admin key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.errors import Forbidden, SymbiosisError, Unauthorized
from symbiosis.server.openai.errors import BadRequest, error_response, no_such_path
from symbiosis.server.requests.body import drain_body
from symbiosis.server.settings import ADMIN

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Need no key, and tell nothing but liveness and readiness."""
TENANT_PATHS = frozenset(
    {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    | {"/v1/adapters", "/v1/files", "/v1/fine_tuning/jobs"}
    | {"/tokenize", "/detokenize", "/version", "/openapi.json"}
)
TENANT_PREFIXES = ("/v1/models/", "/v1/adapters/", "/v1/files/", "/v1/fine_tuning/jobs/")
ADMIN_PATHS = frozenset(
    {"/metrics", "/v1/statistics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin_lora_adapter"}
)
"""Existing admin paths, which give a tenant 403; any other path gives 404."""


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    is_admin: bool

    @property
    def owner(self) -> str | None:
        """Owner of the adapters it uploads; None: shared by all tenants."""
        return None if self.is_admin else self.tenant


def is_tenant_path(path: str) -> bool:
    return path in TENANT_PATHS or path.startswith(TENANT_PREFIXES)


class ApiKeys:
    """Secrets of tenants and the admin. Without any, every caller is the admin.

    With tenants' keys but no admin key, the admin's routes are closed.
    """

    def __init__(self, tenants: Mapping[str, str], admin: str | None = None) -> None:
        self._callers = [(_digest(secret), Caller(name, False)) for name, secret in tenants.items()]
        self._has_admin = admin is not None
        if admin is not None:
            self._callers.append((_digest(admin), Caller(ADMIN, True)))
        self._anonymous = None if tenants else Caller("", admin is None)

    def authenticate(self, authorization: str | None) -> Caller:
        """Raises `Unauthorized`; the message never repeats a key."""
        scheme, _, secret = (authorization or "").partition(" ")
        given = _digest(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
        found = self._anonymous
        if given is not None:
            for digest, caller in self._callers:  # no early exit: the time tells nothing
                if hmac.compare_digest(digest, given):
                    found = caller
        if found is not None:
            return found
        if given is None:
            raise Unauthorized("no key: send `Authorization: Bearer KEY`")
        raise Unauthorized("unknown key")

    def how_to_be_admin(self) -> str:
        if self._has_admin:
            return "this key is a tenant's; send the admin key, which the provider set with `serve --admin-key`"
        return "this server has no admin key, so it admits no caller here; its provider sets one with `serve --admin-key`"


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class AuthMiddleware:
    """Wraps the whole app and sets `scope["state"]["caller"]`.

    `hosts`: accepted Host headers of a server without keys. A DNS-rebinding page must not act for the user,
    and a page of another origin must not send forms (`Origin`), unless the provider allows it (`origins`).
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: frozenset[str] | None, origins: Collection[str] = ()) -> None:
        self._app, self._keys, self._hosts, self._origins = app, keys, hosts, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                caller = self._authorize(scope["path"], headers)
            except SymbiosisError as error:
                await drain_body(receive, headers)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        elif scope["type"] not in ("http", "lifespan"):
            return  # web sockets are not supported
        await self._app(scope, receive, send)

    def _authorize(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Raises `Unauthorized`, `Forbidden` or `BadRequest`."""
        caller = self._keys.authenticate(headers.get("authorization"))
        if not is_tenant_path(path) and not caller.is_admin:
            if path not in ADMIN_PATHS:
                raise BadRequest(no_such_path(path), code="not_found", status=404)
            raise Forbidden(f"{path} is for the admin: {self._keys.how_to_be_admin()}")
        if self._hosts is not None and _parse_host(headers.get("host", "")) not in self._hosts:
            raise Forbidden("a server without keys accepts only local addresses as Host, such as 127.0.0.1")
        origin = headers.get("origin")
        if self._hosts is not None and origin is not None and not self._is_accepted(origin, self._hosts):
            raise Forbidden("a server without keys rejects requests of other web pages: start it with keys, or --cors-origin")
        return caller

    def _is_accepted(self, origin: str, hosts: frozenset[str]) -> bool:
        return origin in self._origins or _parse_host(origin.rpartition("://")[2]) in hosts


def _parse_host(header: str) -> str:
    name = header.lower()
    return name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
