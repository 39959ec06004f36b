"""Messages between the engine process and HTTP processes: their types, and how they are encoded and decoded.

Both processes import this module; it imports no torch. A message is a JSON object (`transport.engine_ipc`). An HTTP process
sends operations: an `op`, an `id` of its own and the operation's fields. The engine sends batches of events, each with that
id; ids are decimal numbers. Tokens without logprobs are most of the traffic: those of one step are one frame, the same for
all processes, over a socket of its own (`encode_tokens`). The end of a completion says how many tokens it has, since it may
arrive before the last of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from symbiosis.errors import BadMessage, SymbiosisError, TooManyRequests, from_code
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, check_range
from symbiosis.transport.engine_ipc import Body, EngineAddress

_SAMPLING_FIELDS = {each.name for each in fields(Sampling)}
_MAX_NAME = 256
_ID_BITS, _COMPLETION_BITS = 40, 7
MAX_ID = (1 << _ID_BITS) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """`n` completions of one prompt."""

    id: str = ""
    """Chosen by the caller, unique among its unfinished requests."""
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None
    """The tenant's name for it; `adapters.names` maps it to the engine's name."""
    tenant: str = ""
    n: int = 1
    stream: int = -1
    """Number of the first completion in frames of tokens; -1: its tokens are events."""
    resume: Sequence[Sequence[int] | None] | None = None
    """Tokens that another engine has delivered, of each completion; None for those that have finished."""
    source: EngineAddress | None = None
    """An engine that may have keys and values of its tokens, to fetch them from."""

    @property
    def num_unfinished(self) -> int:
        """Completions that this engine computes."""
        return self.n if self.resume is None else sum(delivered is not None for delivered in self.resume)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued; each of its completions finishes once."""

    id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was not queued, or the operation failed. No other event follows."""

    id: str
    error: SymbiosisError


class Token(NamedTuple):
    """A tuple, because there are tens of thousands a second."""

    id: str
    number: int
    """Index of the completion."""
    token: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one completion; with the error if it failed."""

    id: str
    number: int
    reason: FinishReason
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    tokens: int = 0
    """Tokens of the completion."""
    error: SymbiosisError | None = None


@dataclass(frozen=True, slots=True)
class Preempted:
    """A completion of the request was preempted for lack of KV cache. It goes on by itself, later."""

    id: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an operation other than a request."""

    id: str
    body: Body


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of another service of the engine process."""

    id: str
    body: Body


Event = Accepted | Rejected | Token | Finished | Preempted | Result
"""The events of the engine loop."""


def encode_request(request: GenerateRequest) -> Body:
    """The fields of a `submit` operation."""
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS}
    sampling["logit_bias"] = dict(request.sampling.logit_bias)
    body: Body = {"op": "submit", "prompt": request.prompt, "sampling": sampling}
    if request.resume is not None:
        body["resume"] = request.resume
    if request.source is not None:
        body["source"] = request.source.to_json()
    return body | {"adapter": request.adapter, "tenant": request.tenant, "n": request.n}


def decode_request(id: str, body: Mapping[str, Any], stream: int = -1) -> GenerateRequest:
    """Raises `BadMessage` or `OutOfRange`: its content comes from outside."""
    sampling = parse_sampling(body.get("sampling"))
    prompt = _tokens_field(body.get("prompt"), "prompt")
    n = int_field(body.get("n", 1), "n")
    check_range("n", n, 1, 128, integer=True)
    resume = body.get("resume")
    if resume is not None:
        if not isinstance(resume, list) or len(resume) != n or not any(each is not None for each in resume):
            raise BadMessage(f"resume: expected {n} lists of token ids, null for completions that have finished")
        resume = [None if each is None else _tokens_field(each, "resume") for each in resume]
    adapter = None if body.get("adapter") is None else text_field(body, "adapter")
    tenant = text_field(body, "tenant") if body.get("tenant") else ""
    source = None if body.get("source") is None else EngineAddress.from_json(body["source"])
    return GenerateRequest(
        id=id,
        prompt=prompt,
        sampling=sampling,
        adapter=adapter,
        tenant=tenant,
        n=n,
        stream=stream,
        resume=resume,
        source=source,
    )


def _tokens_field(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadMessage(f"{name}: expected a list of token ids")
    return value


def parse_sampling(given: object) -> Sampling:
    """Sampling parameters of a JSON object; keys of `logit_bias` may be strings. Raises `BadMessage` or `OutOfRange`."""
    if not isinstance(given, dict) or not given.keys() <= _SAMPLING_FIELDS:
        raise BadMessage(f"sampling: expected an object with some of {', '.join(sorted(_SAMPLING_FIELDS))}")
    try:
        if "logit_bias" in given:
            given = {**given, "logit_bias": {int(token): bias for token, bias in given["logit_bias"].items()}}
        return Sampling(**given)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"sampling: {error}") from None


def stream_number(peer: int, id: int) -> int:
    """The stream of the first completion of a peer's request; the others follow it."""
    return (peer << _ID_BITS | id) << _COMPLETION_BITS


def split_stream(stream: int) -> tuple[int, int, int]:
    """Peer, id and index of the completion."""
    rest = stream >> _COMPLETION_BITS
    return rest >> _ID_BITS, rest & MAX_ID, stream & (1 << _COMPLETION_BITS) - 1


def encode_tokens(values: list[int]) -> bytes:
    """`values` are stream and token in turns."""
    return array("q", values).tobytes()


def decode_tokens(frame: bytes) -> Iterator[tuple[int, int]]:
    """Stream and token of each."""
    values = iter(array("q", frame))
    return zip(values, values, strict=True)


def encode_event(event: Event | JobEvent, id: str) -> Any:
    """Tokens are lists. All other events are objects."""
    if isinstance(event, Token):
        assert event.logprobs is not None, "see encode_tokens"
        return [id, event.number, event.token, event.logprobs.chosen, event.logprobs.top]
    if isinstance(event, Finished):
        body: Body = {"id": id, "end": event.reason.value, "number": event.number}
        body |= {"cached": event.cached, "tokens": event.tokens}
        return body if event.error is None else {**body, "error": _encode_error(event.error)}
    if isinstance(event, Rejected):
        return {"id": id, "refused": _encode_error(event.error)}
    if isinstance(event, Result):
        return {"id": id, "settled": event.body}
    if isinstance(event, Preempted):
        return {"id": id, "preempted": True}
    return {"id": id, "accepted": True} if isinstance(event, Accepted) else {"id": id, **event.body}


def decode_event(raw: Any) -> Event | JobEvent:
    """The inverse of `encode_event`, for what the engine sends."""
    if isinstance(raw, list):
        id, number, token, *logprobs = raw
        return Token(id, number, token, Logprobs(*logprobs))
    id = raw["id"]
    if "end" in raw:
        error = _decode_error(raw["error"]) if "error" in raw else None
        return Finished(id, raw["number"], FinishReason(raw["end"]), raw["cached"], raw["tokens"], error)
    if "refused" in raw:
        return Rejected(id, _decode_error(raw["refused"]))
    if "settled" in raw:
        return Result(id, raw["settled"])
    if "preempted" in raw:
        return Preempted(id)
    return Accepted(id) if "accepted" in raw else JobEvent(id, raw)


def text_field(body: Mapping[str, Any], name: str, max_length: int = _MAX_NAME) -> str:
    """A text of a message. Raises `BadMessage`."""
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= max_length:
        raise BadMessage(f"{name}: expected a text of 1 to {max_length} characters")
    return value


def int_field(value: object, name: str) -> int:
    """An integer of a message. Raises `BadMessage`."""
    if type(value) is not int:
        raise BadMessage(f"{name}: expected an integer")
    return value


def _encode_error(error: SymbiosisError) -> Body:
    body: Body = {"code": error.code, "message": str(error), "field": getattr(error, "field", "")}
    return {**body, "retry_s": error.retry_s} if isinstance(error, TooManyRequests) else body


def _decode_error(body: Body) -> SymbiosisError:
    error = from_code(body["code"], body["message"])
    if isinstance(error, TooManyRequests):
        error.retry_s = body["retry_s"]
    if body.get("field"):
        error.field = body["field"]  # type: ignore[attr-defined]
    return error
