"""HTTP/1.1 connections: uvicorn's httptools protocol with limits on their number, their heads and the time they may take.

| limit | what happens |
|---|---|
| connections of the process | the one that has been idle longest is closed; without an idle one, the new one gets 503 |
| time to send a head | 408 |
| headers of a head; bytes of a head, or of anything but content in a body | 431 |
| a response that ends before its request's body | the connection is closed |
| a request before the response to the last one (pipelining) | it is dropped, and the connection is closed after that response |
| time that a response stays unread | the connection is aborted |

Bodies have their own timeout in `body`; idle connections have uvicorn's.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from symbiosis.errors import TooManyRequests
from symbiosis.server.connections.shared_counts import SharedCounts
from symbiosis.server.openai.errors import BadRequest, error_body

_MAX_HEAD = 64 << 10
_MAX_HEADERS = 128
_LINGER_S = 2.0
"""After a response that ended before its request, bytes are read and dropped for this long: a reset could overtake it."""
_WRITE_TIMEOUTS = 3  # a response may stay unread for this many timeouts


@dataclass(slots=True)
class ConnectionLimits:
    """Limits of a process's connections, and its idle ones."""

    timeout_s: float
    max_connections: int
    counts: SharedCounts | None = None
    """None: no other process accepts connections."""
    idle: dict[HttpProtocol, None] = field(default_factory=dict)
    """Connections without a request in progress, the one that is idle longest first."""


def _encode_response(status: str, error: Exception) -> bytes:
    """A response outside of any request."""
    body = json.dumps(error_body(error)).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class _Pipelined(Exception):
    """Stops the parser."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. At most one request is in progress."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._is_in_head, self._is_upgrade, self._is_closing = True, False, False
        self._overhead = 0  # bytes since the last content: of a head, or of chunk headers and trailers
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._count()
        most, idle = self._limits.max_connections, self._limits.idle
        if len(self.connections) > most:
            if idle:
                # a response may still be on its way to one that is idle
                oldest = next((each for each in idle if not each.transport.get_write_buffer_size()), next(iter(idle)))
                del idle[oldest]
                oldest.transport.abort()
            else:
                error = TooManyRequests(f"{most} connections are open, and no more are allowed")
                self._reject("503 Service Unavailable", error)
                return
        idle[self] = None
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._unset_keepalive_if_required()
        self._overhead += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            reason = error.__context__ or error
            if isinstance(reason, _Pipelined):
                self._is_closing = True  # after the response in progress
                return
            if not isinstance(reason, BadRequest):
                reason = BadRequest(f"this is no valid HTTP/1.1 request: {error!s:.120}", code="invalid_http")
            self._reject("431 Request Header Fields Too Large" if reason.status == 431 else "400 Bad Request", reason)
            return
        if self._overhead > _MAX_HEAD:
            self._reject("431 Request Header Fields Too Large", _head_too_large())
        elif self._is_idle():
            self._start_head_timer()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The request without its Upgrade header, which some clients send with every request, for another parser."""
        fields = [each for each in self.headers if each[0] not in (b"upgrade", b"connection", b"http2-settings")]
        head = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        head += b"".join(b"%b: %b\r\n" % each for each in fields) + b"\r\n"
        self.parser, self._is_upgrade, self._overhead = httptools.HttpRequestParser(self), False, 0
        return head + rest

    def on_message_begin(self) -> None:
        if not self._is_idle():
            raise _Pipelined
        self._start_head_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are dropped
            if len(self.headers) >= _MAX_HEADERS:
                raise _head_too_large()
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise BadRequest("this is no request of HTTP/1.1 to a server of its own", code="invalid_http")
        if self.parser.should_upgrade():
            self._is_upgrade = True
            return
        self._stop_head_timer()
        self._is_in_head = False
        self._limits.idle.pop(self, None)
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise BadRequest(f"the request has {len(hosts)} Host headers: expected one", code="invalid_http")
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD:
            raise _head_too_large()
        self._overhead = 0
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]  # as much as the cycle uses

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._is_in_head, self._overhead = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.more_body or self._is_closing:
            self.end()
        else:
            self._limits.idle[self] = None

    def end(self) -> None:
        """Close after what was written, although more of this request, or of others, may come."""
        is_sending = self.cycle is None or self.cycle.more_body or self._is_closing
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._is_closing = True
        if self.transport.is_closing():
            return
        if is_sending:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.close_unread)
        else:
            self.close_unread()

    def close_unread(self) -> None:
        """Close after what was written, which the client has a while to read."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(_WRITE_TIMEOUTS * self._limits.timeout_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self.close_unread()

    def _start_head_timer(self) -> None:
        """The timer starts with the wait for a head. Partial heads do not extend it."""
        if self._head_timer is None:
            error = BadRequest("timeout: the head of the request was sent too slowly", code="request_timeout", status=408)
            self._head_timer = self.loop.call_later(self._limits.timeout_s, self._reject, "408 Request Timeout", error)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reject(self, status: str, error: Exception) -> None:
        """A response outside of any request. If one is in progress, the connection ends without: both would mix."""
        if self._is_closing:
            return
        self._is_closing = True
        self._stop_head_timer()
        if not self._is_idle() and self.cycle.response_started:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_encode_response(status, error))
            if self._is_idle():
                self.end()
            else:
                self.close_unread()  # the handler sees a client that has gone

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(_WRITE_TIMEOUTS * self._limits.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.idle.pop(self, None)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._count()

    def _count(self) -> None:
        if self._limits.counts is not None:
            self._limits.counts.set(len(self.connections))


class _ResponseTransport:
    """What a response uses of its connection's transport: closing it is the protocol's."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing
        self.close = protocol.end


def _head_too_large() -> BadRequest:
    message = f"the request has more than {_MAX_HEADERS} headers, or {_MAX_HEAD} bytes of them: expected fewer"
    return BadRequest(message, code="header_too_large", status=431)
