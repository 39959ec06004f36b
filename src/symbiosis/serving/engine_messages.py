"""Messages between the engine process and HTTP processes: their types, and how they are encoded and decoded.

Both processes import this module; it imports no torch. A message is a JSON object (`transport.engine_ipc`). An HTTP process
sends operations: an `op`, an `id` of its own and the operation's fields. The engine sends batches of events, each with that
id; ids are decimal numbers. Tokens without logprobs are most of the traffic: those of one step are a second frame of 32-bit
numbers, three for each token: id, index of the completion, token. They precede the events of their message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from symbiosis.errors import BadMessage, SymbiosisError, TooManyRequests, from_code
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, check_range
from symbiosis.transport.engine_ipc import Body

_SAMPLING_FIELDS = {each.name for each in fields(Sampling)}
_MAX_NAME = 256


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
    error: SymbiosisError | None = None


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


Event = Accepted | Rejected | Token | Finished | Result
"""The events of the engine loop."""


def encode_request(request: GenerateRequest) -> Body:
    """The fields of a `submit` operation."""
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS}
    sampling["logit_bias"] = dict(request.sampling.logit_bias)
    body: Body = {"op": "submit", "prompt": request.prompt, "sampling": sampling}
    return body | {"adapter": request.adapter, "tenant": request.tenant, "n": request.n}


def decode_request(id: str, body: Mapping[str, Any]) -> GenerateRequest:
    """Raises `BadMessage` or `OutOfRange`: its content comes from outside."""
    sampling = parse_sampling(body.get("sampling"))
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadMessage("prompt: expected a list of token ids")
    n = int_field(body.get("n", 1), "n")
    check_range("n", n, 1, 128, integer=True)
    adapter = None if body.get("adapter") is None else text_field(body, "adapter")
    tenant = text_field(body, "tenant") if body.get("tenant") else ""
    return GenerateRequest(id=id, prompt=prompt, sampling=sampling, adapter=adapter, tenant=tenant, n=n)


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


def encode_tokens(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def decode_tokens(frame: bytes) -> Iterator[tuple[int, int, int]]:
    """(id, index of the completion, token) of each."""
    values = iter(array("i", frame))
    return zip(values, values, values, strict=True)


def encode_event(event: Event | JobEvent, id: str) -> Any:
    """Tokens are lists. All other events are objects."""
    if isinstance(event, Token):
        assert event.logprobs is not None, "see encode_tokens"
        return [id, event.number, event.token, event.logprobs.chosen, event.logprobs.top]
    if isinstance(event, Finished):
        body: Body = {"id": id, "end": event.reason.value, "number": event.number, "cached": event.cached}
        return body if event.error is None else {**body, "error": _encode_error(event.error)}
    if isinstance(event, Rejected):
        return {"id": id, "refused": _encode_error(event.error)}
    if isinstance(event, Result):
        return {"id": id, "settled": event.body}
    return {"id": id, "accepted": True} if isinstance(event, Accepted) else {"id": id, **event.body}


def decode_event(raw: Any) -> Event | JobEvent:
    """The inverse of `encode_event`, for what the engine sends."""
    if isinstance(raw, list):
        id, number, token, *logprobs = raw
        return Token(id, number, token, Logprobs(*logprobs))
    id = raw["id"]
    if "end" in raw:
        error = _decode_error(raw["error"]) if "error" in raw else None
        return Finished(id, raw["number"], FinishReason(raw["end"]), raw["cached"], error)
    if "refused" in raw:
        return Rejected(id, _decode_error(raw["refused"]))
    if "settled" in raw:
        return Result(id, raw["settled"])
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
