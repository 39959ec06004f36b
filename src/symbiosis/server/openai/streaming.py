"""Server-sent events of streamed completions and chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from symbiosis.server.generation import Generation, TextDelta
from symbiosis.server.openai.errors import error_body
from symbiosis.server.openai.responses import ResponseFormatter

_DONE = b"data: [DONE]\n\n"


def _encode(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def stream_events(
    deltas: AsyncIterator[TextDelta], generation: Generation, formatter: ResponseFormatter, include_usage: bool
) -> AsyncIterator[bytes]:
    """Chunks of all choices, then `[DONE]`. An error becomes an event: the status is already sent."""
    try:
        opened: set[int] = set()
        async for delta in deltas:
            if delta.index not in opened:
                opened.add(delta.index)
                for body in formatter.opening_chunks(delta.index):
                    yield _encode(body)
            yield _encode(formatter.chunk(delta))
        if include_usage:
            yield _encode(formatter.usage_chunk(generation.usage))
    except Exception as error:  # noqa: BLE001 - mapped to an event
        yield _encode(error_body(error))
    yield _DONE


class EventStream(StreamingResponse):
    """Closes `resources` however the stream ends, which cancels unfinished sequences."""

    def __init__(self, events: AsyncIterator[bytes], resources: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
