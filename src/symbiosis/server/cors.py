"""CORS: lets browsers send requests of other origins' pages and read the responses.

A preflight is answered without a key: it has none, and tells only which origins are allowed. Every other request is
authorized as usual, and a server without keys still checks its Host.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "POST", "PUT", "DELETE")
_MAX_AGE_S = 600


def allow_origins(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """The app itself without origins. Cookies are never allowed: keys are sent in `Authorization`."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=_METHODS,
        allow_headers=["*"],  # clients of OpenAI send many of their own
        expose_headers=["Retry-After"],
        allow_private_network=True,  # a page of the internet may use a server of this machine
        max_age=_MAX_AGE_S,
    )
