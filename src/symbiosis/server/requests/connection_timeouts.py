"""Limits of HTTP connections: their number, the time to receive a request's head, the time to send a response.

Bodies have their own timeout in `body`; idle connections have uvicorn's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from symbiosis.errors import TooManyRequests
from symbiosis.server.openai.errors import BadRequest, error_body

_WRITE_TIMEOUTS = 3  # a response may stay unread for this many timeouts


def _encode_response(status: str, error: Exception) -> bytes:
    """A response outside of any request."""
    body = json.dumps(error_body(error)).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class TimeoutProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, timeout_s: float, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeout_s, self._max_connections = timeout_s, max_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            error = TooManyRequests(f"{self._max_connections} connections are open, and no more are allowed")
            self._reject("503 Service Unavailable", error)
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_head_timer()

    def _update_head_timer(self) -> None:
        """The timer starts with the wait for a head. Partial heads do not extend it."""
        if self.conn.their_state is not h11.IDLE:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            error = BadRequest("timeout: the head of the request was sent too slowly", code="request_timeout", status=408)
            self._head_timer = self.loop.call_later(self._timeout_s, self._reject, "408 Request Timeout", error)

    def _reject(self, status: str, error: Exception) -> None:
        if not self.transport.is_closing():
            self.transport.write(_encode_response(status, error))
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(_WRITE_TIMEOUTS * self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
