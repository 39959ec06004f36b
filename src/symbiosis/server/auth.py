"""Who may ask for what. Deny by default: a route that is not named here is the admin's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.errors import Forbidden, SymbiosisError, Unauthorized
from symbiosis.server.openai.errors import BadRequest, response_of
from symbiosis.server.requests.body import drain
from symbiosis.server.settings import ADMIN

OPEN_PATHS = frozenset({"/health"})
"""Say only that somebody is there."""
TENANTS_PATHS = frozenset(
    {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    | {"/v1/adapters", "/v1/files", "/v1/fine_tuning/jobs"}
    | {"/tokenize", "/detokenize"}
)
ADMINS_PATHS = frozenset({"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin_lora_adapter"})
"""Only for the error: whatever else is not named here is the admin's too."""
TENANTS_FOLDERS = ("/v1/models/", "/v1/adapters/", "/v1/files/", "/v1/fine_tuning/jobs/")


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    is_admin: bool

    @property
    def owner(self) -> str | None:
        """Of the adapters it brings: the admin's are for everybody."""
        return None if self.is_admin else self.tenant


def is_tenants(path: str) -> bool:
    return path in TENANTS_PATHS or path.startswith(TENANTS_FOLDERS)


class ApiKeys:
    """Secrets of tenants, and the admin's. Without any, everybody who can reach the server may do everything.

    With tenants' keys but without an admin's, nobody may use the admin's routes.
    """

    def __init__(self, tenants: Mapping[str, str], admin: str | None = None) -> None:
        self._callers = [(_digest(secret), Caller(name, False)) for name, secret in tenants.items()]
        self._admin = None if admin is None else _digest(admin)
        self._is_open = not tenants

    def caller(self, authorization: str | None) -> Caller:
        """Raises `Unauthorized`; the message never repeats a key."""
        scheme, _, secret = (authorization or "").partition(" ")
        given = _digest(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
        found: Caller | None = None
        if given is not None:
            # all are compared, whichever fits: the time says nothing
            for digest, caller in self._callers:
                if hmac.compare_digest(digest, given):
                    found = caller
            if self._admin is not None and hmac.compare_digest(self._admin, given):
                found = Caller(ADMIN, True)
        if found is not None:
            return found
        if self._is_open:
            return Caller("", self._admin is None)
        if given is None:
            raise Unauthorized("no key: send it as `Authorization: Bearer KEY`")
        raise Unauthorized("this key is not known here")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class AuthMiddleware:
    """Stands before the whole app. The tenant is who the key says, in `scope["state"]["caller"]`.

    `hosts`: names this server may be called by, if it has no keys: a web page
    that made its own name point here must not speak for the user, and a page
    from elsewhere must not send it forms (`Origin`).
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: frozenset[str] | None) -> None:
        self._app, self._keys, self._hosts = app, keys, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            try:
                caller = self._keys.caller(_text(headers.get(b"authorization")))
                if not is_tenants(scope["path"]) and not caller.is_admin:
                    if scope["path"] not in ADMINS_PATHS:
                        raise BadRequest(f"there is no {scope['path']}", code="not_found", status=404)
                    raise Forbidden("this is the admin's: use the key given with --admin-key")
                if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
                    raise Forbidden("a server without keys is called by an address of this machine, such as 127.0.0.1")
                origin = headers.get(b"origin")
                if self._hosts is not None and origin is not None and _host(origin.rpartition(b"://")[2]) not in self._hosts:
                    raise Forbidden("a server without keys is not for web pages from elsewhere: give it keys")
            except SymbiosisError as error:
                await drain(receive, {"expect": _text(headers.get(b"expect")) or ""})
                await response_of(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        elif scope["type"] not in ("http", "lifespan"):
            return  # no web sockets here
        await self._app(scope, receive, send)


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


def _host(header: bytes) -> str:
    name = header.decode("latin-1").lower()
    return name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
