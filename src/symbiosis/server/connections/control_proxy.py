"""Forwards requests of a worker process to the control process, over a socket in a private folder.

Everything with a state (adapters, files, jobs, metrics) has one owner: the control process. The request's head goes there
unchanged, with its key, which is checked again. Bodies are forwarded as they come, and nothing is kept of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import h11
from starlette.types import Receive, Scope, Send

from symbiosis.server.openai.errors import BadRequest, error_response

_CHUNK = 1 << 18
_OWN_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"date", b"origin"}
)
"""Of one connection, not of the request or response; and Origin, for which the worker answers."""


class ControlProxy:
    """An ASGI app."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_CHUNK)
        except OSError:
            error = BadRequest("this part of the server is starting again: try again", code="starting", status=503)
            await error_response(error)(scope, receive, send)
            return
        exchange = _Exchange(scope, reader, writer)
        try:
            await exchange.run(receive, send)
        except (h11.ProtocolError, OSError) as failure:
            if exchange.is_started:
                raise
            is_ours = isinstance(failure, h11.LocalProtocolError)
            status = 400 if is_ours else 503
            error = BadRequest(
                f"the request cannot be forwarded: {failure}" if is_ours else "this part of the server has failed: try again",
                code="invalid_http" if is_ours else "starting",
                status=status,
            )
            await error_response(error)(scope, receive, send)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._scope, self._reader, self._writer = scope, reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._may_send = asyncio.Event()
        self.is_started = False
        """Whether the response has started."""

    async def run(self, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self._scope["headers"] if name not in _OWN_HEADERS]
        has_body = any(name == b"content-length" and value != b"0" for name, value in headers)
        if any(name == b"transfer-encoding" for name, _ in self._scope["headers"]):
            headers.append((b"transfer-encoding", b"chunked"))
            has_body = True
        query = self._scope["query_string"]
        target = self._scope["raw_path"] + (b"?" + query if query else b"")
        if not any(name == b"host" for name, _ in headers):
            headers.append((b"host", b"localhost"))
        await self._write(h11.Request(method=self._scope["method"], target=target, headers=headers))
        if not any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers):
            self._may_send.set()
        if not has_body:
            await self._write(h11.EndOfMessage())
        body = asyncio.ensure_future(self._forward_body(receive, has_body))
        answer = asyncio.ensure_future(self._forward_response(send))
        try:
            await asyncio.wait({body, answer}, return_when=asyncio.FIRST_COMPLETED)
            if body.done() and not answer.done() and body.result():  # the client has gone
                return
            await answer
        finally:
            for task in (body, answer):
                task.cancel()
            await asyncio.gather(body, answer, return_exceptions=True)

    async def _forward_body(self, receive: Receive, has_body: bool) -> bool:
        """True: the client has gone."""
        await self._may_send.wait()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return True
            if has_body:
                with suppress(OSError, RuntimeError, h11.LocalProtocolError):  # the response has come before the body's end
                    if message.get("body"):
                        await self._write(h11.Data(data=message["body"]))
                    if not message.get("more_body"):
                        await self._write(h11.EndOfMessage())

    async def _forward_response(self, send: Send) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                try:
                    self._http.receive_data(await self._reader.read(_CHUNK))
                except OSError:
                    self._http.receive_data(b"")
            elif isinstance(event, h11.InformationalResponse):
                self._may_send.set()
            elif isinstance(event, h11.Response):
                headers = [(name, value) for name, value in event.headers if name not in _OWN_HEADERS]
                self.is_started = True
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif self.is_started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return

    async def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()
