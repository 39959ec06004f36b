"""Connections that are waited for only so long: for a request's head to come, and for an answer to be read.

(Bodies have their own time, in `bodies`; a connection that is kept open between two requests has uvicorn's.)
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from symbiosis.errors import TooManyRequests
from symbiosis.server.openai.errors import BadRequest, body_of

_READ_TIMES = 3  # an answer may lie unread for so many patiences


def _written(status: str, error: Exception) -> bytes:
    """An answer outside of any request."""
    body = json.dumps(body_of(error)).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class TimeoutProtocol(H11Protocol):
    """One connection. `most`: how many there may be at once."""

    def __init__(self, *args: Any, patience_s: float, most: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience_s, self._most = patience_s, most
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse("503 Service Unavailable", TooManyRequests(f"{self._most} connections are open, and no more may be"))
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def _expect_head(self) -> None:
        """The time runs from the head's first moment, however often a byte of it comes."""
        if self.conn.their_state is not h11.IDLE:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            error = BadRequest("the head of the request came too slowly", code="request_timeout", status=408)
            self._head = self.loop.call_later(self._patience_s, self._refuse, "408 Request Timeout", error)

    def _refuse(self, status: str, error: Exception) -> None:
        if not self.transport.is_closing():
            self.transport.write(_written(status, error))
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(_READ_TIMES * self._patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
