"""Request bodies, bounded in size and time, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from symbiosis.errors import SymbiosisError, TooLarge
from symbiosis.server.openai.errors import BadRequest, to_bad_request
from symbiosis.server.openai.strict_model import StrictModel
from symbiosis.server.requests.json_budget import check_values
from symbiosis.server.requests.multipart import MultipartForm

_MAX_JSON_BYTES = 16 << 20
_MIN_BYTES_PER_S = 32 << 10
"""The timeout of a body grows by a second for this many bytes received."""
_DRAIN_BYTES, _DRAIN_S = 32 << 20, 5.0
_Schema = TypeVar("_Schema", bound=StrictModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _TooSlow(BadRequest):
    pass


async def read_chunks(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Raises `TooLarge`, or `BadRequest` if the client exceeds `request.state.timeout_s`."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise TooLarge(f"the body has {announced} bytes, at most {max_bytes} allowed")
    started, received = time.monotonic(), 0
    stream = aiter(request.stream())
    while True:
        left_s = started + request.state.timeout_s + received / _MIN_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _TooSlow("timeout: the body was sent too slowly", code="request_timeout", status=408) from None
        received += len(chunk)
        if received > max_bytes:
            raise TooLarge(f"the body has more than the {max_bytes} bytes allowed")
        yield chunk


async def read_json(request: Request, schema: type[_Schema], *, unique_keys: bool = False) -> _Schema:
    """The validated body. Only JSON is accepted: a form of another web page has no effect.

    `unique_keys` rejects duplicate keys. It parses twice, which completions avoid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the body must be JSON: send Content-Type: application/json", status=415)
    body = bytearray()
    async for chunk in read_chunks(request, _MAX_JSON_BYTES):
        body += chunk
    check_values(body)
    try:
        parsed = schema.model_validate_json(bytes(body))
    except ValidationError as error:
        raise to_bad_request(error) from None
    if unique_keys:
        json.loads(body, object_pairs_hook=_check_unique)
    return parsed


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    key, count = next(iter(Counter(key for key, _ in pairs).most_common(1)), ("", 0))
    if count > 1:
        raise BadRequest(f"duplicate key {key!r:.60} in the body: leave one out", field=key[:60])


async def read_form(request: Request, max_bytes: int, fields: Collection[str]) -> AsyncIterator[tuple[str, bytes]]:
    """Chunks of the fields of a form. Raises unless every field is there exactly once."""
    form = MultipartForm(request.headers.get("content-type", ""), fields)
    async for chunk in read_chunks(request, max_bytes):
        for field, content in form.feed(chunk):
            yield field, content
    form.finish()


async def drain_body(receive: Receive, headers: Mapping[str, str]) -> None:
    """Read a rejected body for a while: a client that is still sending when the connection closes loses the response."""
    if headers.get("expect", "").lower() == "100-continue":
        return  # the client sends no body before it is requested
    received = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while received < _DRAIN_BYTES:
                message = await receive()
                received += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


async def cancel_on_disconnect(request: Request, handler: Handler) -> Response:
    """Run a handler. If the client disconnects, cancel it and raise `ClientDisconnect`."""
    if request.method == "GET":
        return await handler(request)
    receive, is_read, is_gone = request.receive, asyncio.Event(), asyncio.Event()

    async def watch_receive() -> Any:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            is_read.set()
        elif message["type"] == "http.disconnect":
            is_gone.set()
        return message

    async def wait_for_disconnect() -> None:
        await is_read.wait()
        while not is_gone.is_set():
            if (await receive())["type"] == "http.disconnect":
                is_gone.set()

    request._receive = watch_receive
    work = asyncio.ensure_future(handler(request))
    disconnect = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        error = work.exception()
        is_rejected = isinstance(error, SymbiosisError) and not isinstance(error, _TooSlow)
        if is_rejected and not is_read.is_set() and not is_gone.is_set():
            await drain_body(receive, request.headers)
        return work.result()
    finally:
        for task in (work, disconnect):
            task.cancel()
        await asyncio.gather(work, disconnect, return_exceptions=True)
