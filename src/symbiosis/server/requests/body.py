"""Bodies of requests, bounded in size and time: whoever sends slowly is not waited for."""

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
from symbiosis.server.openai.errors import BadRequest, bad_request
from symbiosis.server.openai.schemas import Strict
from symbiosis.server.requests.json_budget import check_values
from symbiosis.server.requests.multipart import MultipartForm

MAX_JSON = 16 << 20
_BYTES_PER_S = 32 << 10
"""A body may take the server's patience, and a second more for each of these."""
_DRAIN_BYTES, _DRAIN_S = 32 << 20, 5.0
_Schema = TypeVar("_Schema", bound=Strict)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _TooSlow(BadRequest):
    pass


async def pieces(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises `TooLarge`, or `BadRequest` if it comes too slowly for `request.state.patience_s`."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > most:
        raise TooLarge(f"the body has {announced} bytes, at most {most} are taken")
    begun, taken = time.monotonic(), 0
    stream = aiter(request.stream())
    while True:
        left = begun + request.state.patience_s + taken / _BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(left):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _TooSlow("the body came too slowly", code="request_timeout", status=408) from None
        taken += len(piece)
        if taken > most:
            raise TooLarge(f"the body has more than the {most} bytes that are taken")
        yield piece


async def read_json(request: Request, schema: type[_Schema], *, keys_once: bool = False) -> _Schema:
    """The body by its schema. Only JSON: a form of some web page cannot ask for anything.

    `keys_once`: a key that stands twice is refused. It takes a second look, which requests for answers are spared.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the body must be JSON: send Content-Type: application/json", status=415)
    body = bytearray()
    async for piece in pieces(request, MAX_JSON):
        body += piece
    check_values(body)
    try:
        wish = schema.model_validate_json(bytes(body))
    except ValidationError as error:
        raise bad_request(error) from None
    if keys_once:
        json.loads(body, object_pairs_hook=_check_once)
    return wish


def _check_once(pairs: list[tuple[str, Any]]) -> None:
    twice = next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), None)
    if twice is not None:
        raise BadRequest(f"{twice!r:.60} stands twice in the body: leave one out", field=twice[:60])


async def read_form(request: Request, most: int, fields: Collection[str]) -> AsyncIterator[tuple[str, bytes]]:
    """The fields of a form, each in pieces; all of them, once."""
    form = MultipartForm(request.headers.get("content-type", ""), fields)
    async for piece in pieces(request, most):
        for each in form.feed(piece):
            yield each
    form.finish()


async def drain(receive: Receive, headers: Mapping[str, str]) -> None:
    """Read on for a while before refusing: who is still sending when the connection is closed never hears why."""
    if headers.get("expect", "").lower() == "100-continue":
        return  # it waits to be asked for its body
    taken = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while taken < _DRAIN_BYTES:
                message = await receive()
                taken += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


async def unless_gone(request: Request, handler: Handler) -> Response:
    """Run a handler until it is done or the client leaves; then it is cancelled and `ClientDisconnect` raised."""
    if request.method == "GET":
        return await handler(request)
    receive, gone = request.receive, asyncio.Event()

    async def watched() -> Any:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            read.set()
        elif message["type"] == "http.disconnect":
            gone.set()
        return message

    async def wait_gone() -> None:
        await read.wait()
        while not gone.is_set():
            if (await receive())["type"] == "http.disconnect":
                gone.set()

    read = asyncio.Event()
    request._receive = watched
    work = asyncio.ensure_future(handler(request))
    leaving = asyncio.ensure_future(wait_gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        is_slow = isinstance(work.exception(), _TooSlow)
        if isinstance(work.exception(), SymbiosisError) and not is_slow and not read.is_set() and not gone.is_set():
            await drain(receive, request.headers)
        return work.result()
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)
