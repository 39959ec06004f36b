"""Bodies and chunks in OpenAI's shapes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from symbiosis.server.generation import Logprob, TextDelta, Usage

Body = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(body: Body) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class ResponseFormatter(Protocol):
    """How one route writes its answers."""

    def whole(self, pieces: Sequence[TextDelta], usage: Usage) -> Body: ...

    def first(self, index: int) -> list[Body]:
        """Chunks before an answer's first piece."""
        ...

    def chunk(self, piece: TextDelta) -> Body: ...

    def last(self, usage: Usage) -> Body:
        """The chunk with the usage, if it was asked for."""
        ...


class _Base:
    _object = ""
    _prefix = ""

    def __init__(self, model: str, shown: Callable[[int], str], *, with_usage: bool = False) -> None:
        """`model` is repeated as the caller named it; `shown` is a token's text; `with_usage`: chunks say `usage: null`."""
        self._model, self._shown, self._with_usage = model, shown, with_usage
        self._id, self._created = f"{self._prefix}-{secrets.token_hex(12)}", int(time.time())

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

    def _chunk(self, kind: str, choice: Body) -> Body:
        body = self._body(kind, [choice])
        return {**body, "usage": None} if self._with_usage else body


class CompletionFormatter(_Base):
    """/v1/completions."""

    _prefix = "cmpl"

    def __init__(self, model: str, shown: Callable[[int], str], *, with_usage: bool = False) -> None:
        super().__init__(model, shown, with_usage=with_usage)
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: Sequence[TextDelta], usage: Usage) -> Body:
        return self._body("text_completion", [self._choice(piece) for piece in pieces], usage)

    def first(self, index: int) -> list[Body]:
        return []

    def chunk(self, piece: TextDelta) -> Body:
        return self._chunk("text_completion", self._choice(piece))

    def last(self, usage: Usage) -> Body:
        return self._body("text_completion", [], usage)

    def _choice(self, piece: TextDelta) -> Body:
        logprobs = self._logprobs(piece) if piece.logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, piece: TextDelta) -> Body:
        texts = [self._shown(each.token) for each in piece.logprobs]
        offsets, at = [], self._offsets.get(piece.index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[piece.index] = at
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in piece.logprobs],
            "top_logprobs": [self._likely(each) for each in piece.logprobs],
            "text_offset": offsets,
        }

    def _likely(self, each: Logprob) -> dict[str, float]:
        """Likeliest first, with the token chosen; of two tokens with one text, the likelier."""
        found: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(self._shown(token), logprob)
        return found


class ChatFormatter(_Base):
    """/v1/chat/completions."""

    _prefix = "chatcmpl"

    def whole(self, pieces: Sequence[TextDelta], usage: Usage) -> Body:
        choices = [
            {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text},
                "logprobs": self._logprobs(piece.logprobs),
                "finish_reason": piece.finish,
            }
            for piece in pieces
        ]
        return self._body("chat.completion", choices, usage)

    def first(self, index: int) -> list[Body]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def chunk(self, piece: TextDelta) -> Body:
        delta = {"content": piece.text} if piece.text or not piece.finish else {}
        return self._delta(piece.index, delta, piece.logprobs, piece.finish)

    def last(self, usage: Usage) -> Body:
        return self._body("chat.completion.chunk", [], usage)

    def _delta(self, index: int, delta: Body, logprobs: Sequence[Logprob] = (), finish: str | None = None) -> Body:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finish}
        return self._chunk("chat.completion.chunk", choice)

    def _logprobs(self, logprobs: Sequence[Logprob]) -> Body | None:
        if not logprobs:
            return None
        return {
            "content": [
                {**self._one(each.token, each.logprob), "top_logprobs": [self._one(*likely) for likely in each.top]}
                for each in logprobs
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> Body:
        text = self._shown(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
