"""The HTTP server fixtures of `tests/server`, for commands that call a server."""

from tests.server.conftest import *  # noqa: F403 - fixtures
