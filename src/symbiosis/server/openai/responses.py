"""Responses of completions and chats in OpenAI's format: whole bodies, and streams of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from json.encoder import encode_basestring
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from symbiosis.server.generation import Generation, Logprob, TextDelta, Usage
from symbiosis.server.openai.errors import error_body

Body = dict[str, Any]
_DONE = b"data: [DONE]\n\n"


class ResponseFormatter(ABC):
    """Formats the response to one request."""

    _id_prefix, _object, _chunk_object = "", "", ""

    def __init__(self, model: str, token_text: Callable[[int], str], *, include_usage: bool = False) -> None:
        """`model` is repeated as the request names it. With `include_usage`, chunks have `usage: null`."""
        self._model, self._token_text, self._include_usage = model, token_text, include_usage
        self._id, self._created = f"{self._id_prefix}-{secrets.token_hex(12)}", int(time.time())
        self._text_offsets: dict[int, int] = {}  # by choice

    def full_body(self, deltas: Sequence[TextDelta], usage: Usage) -> Body:
        """The response that is not streamed."""
        return self._body(self._object, [self._choice(delta) for delta in deltas], usage)

    def opening_chunks(self, index: int) -> list[Body]:
        """Chunks before the first text of a choice."""
        return []

    @abstractmethod
    def chunk(self, delta: TextDelta) -> Body: ...

    def usage_chunk(self, usage: Usage) -> Body:
        """The last chunk, if `include_usage` is set."""
        return self._body(self._chunk_object, [], usage)

    @abstractmethod
    def _choice(self, delta: TextDelta) -> Body: ...

    def _body(self, kind: str, choices: list[Body], usage: Usage | None = None) -> Body:
        body: Body = {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        if usage is not None:
            body["usage"] = {
                "prompt_tokens": usage.prompt,
                "completion_tokens": usage.completion,
                "total_tokens": usage.prompt + usage.completion,
                "prompt_tokens_details": {"cached_tokens": min(usage.cached, usage.prompt)},
            }
        return body

    def _chunk(self, choice: Body) -> Body:
        body = self._body(self._chunk_object, [choice])
        return {**body, "usage": None} if self._include_usage else body


class CompletionFormatter(ResponseFormatter):
    """/v1/completions."""

    _id_prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def chunk(self, delta: TextDelta) -> Body:
        return self._chunk(self._choice(delta))

    def _choice(self, delta: TextDelta) -> Body:
        logprobs = self._format_logprobs(delta) if delta.logprobs else None
        return {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _format_logprobs(self, delta: TextDelta) -> Body:
        texts = [self._token_text(each.token) for each in delta.logprobs]
        offsets, offset = [], self._text_offsets.get(delta.index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._text_offsets[delta.index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in delta.logprobs],
            "top_logprobs": [self._format_top(each) for each in delta.logprobs],
            "text_offset": offsets,
        }

    def _format_top(self, logprob: Logprob) -> dict[str, float]:
        """Most probable first, with the chosen token; of two tokens with one text, the more probable."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
            top.setdefault(self._token_text(token), value)
        return top


class ChatFormatter(ResponseFormatter):
    """/v1/chat/completions."""

    _id_prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening_chunks(self, index: int) -> list[Body]:
        return [self._chunk(self._wrap(TextDelta(index, ""), delta={"role": "assistant", "content": ""}))]

    def chunk(self, delta: TextDelta) -> Body:
        return self._chunk(self._wrap(delta, delta={"content": delta.text} if delta.text or not delta.finish else {}))

    def _choice(self, delta: TextDelta) -> Body:
        return self._wrap(delta, message={"role": "assistant", "content": delta.text})

    def _wrap(self, text: TextDelta, **content: Body) -> Body:
        return {
            "index": text.index,
            **content,
            "logprobs": self._format_logprobs(text.logprobs),
            "finish_reason": text.finish,
        }

    def _format_logprobs(self, logprobs: Sequence[Logprob]) -> Body | None:
        if not logprobs:
            return None
        content = [
            {**self._format_token(each.token, each.logprob), "top_logprobs": [self._format_token(*top) for top in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _format_token(self, token: int, logprob: float) -> Body:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class ChunkTemplate:
    """Encodes the chunks of one choice. Most differ in their text only, which is put into an encoded chunk."""

    def __init__(self, formatter: ResponseFormatter, index: int) -> None:
        self._formatter = formatter
        mark = secrets.token_hex(16)
        self._head, _, self._tail = _encode(formatter.chunk(TextDelta(index, mark))).partition(f'"{mark}"'.encode())

    def encode(self, delta: TextDelta) -> bytes:
        if delta.finish is None and not delta.logprobs:
            return self._head + encode_basestring(delta.text).encode() + self._tail
        return _encode(self._formatter.chunk(delta))


def _encode(body: Body) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def stream_events(
    deltas: AsyncIterator[list[TextDelta]],
    generation: Generation,
    formatter: ResponseFormatter,
    include_usage: bool,
    resources: AsyncExitStack,
) -> AsyncIterator[bytes]:
    """Chunks of all choices, then `[DONE]`. An error becomes an event: the status is already sent.

    `resources` are closed before the end: the client's next request may reach another process at once.
    """
    templates: dict[int, ChunkTemplate] = {}  # by choice
    try:
        async for batch in deltas:
            frames: list[bytes] = []
            for delta in batch:
                template = templates.get(delta.index)
                if template is None:
                    frames += map(_encode, formatter.opening_chunks(delta.index))
                    template = templates[delta.index] = ChunkTemplate(formatter, delta.index)
                frames.append(template.encode(delta))
            yield b"".join(frames)
        if include_usage:
            yield _encode(formatter.usage_chunk(generation.usage))
    except Exception as error:  # noqa: BLE001 - mapped to an event
        yield _encode(error_body(error))
    await resources.aclose()
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
