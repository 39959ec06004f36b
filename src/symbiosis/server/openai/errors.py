"""The one place where errors become answers, in OpenAI's shape."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.responses import JSONResponse

from symbiosis import errors
from symbiosis.jobs import errors as job_errors

_INVALID, _AUTH, _DENIED = "invalid_request_error", "authentication_error", "permission_error"
_MISSING, _BUSY, _SERVER = "not_found_error", "rate_limit_error", "server_error"
_SHOULD = "Input should be "  # pydantic
_MOST_FAULTS = 1000
"""Of a body, to be looked at: pydantic tells them all or none, and it takes long."""
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str | None = None
    """If not the error's own: what clients of OpenAI look for."""


_KINDS: dict[type[Exception], _Kind] = {
    errors.OutOfRange: _Kind(400, _INVALID, "invalid_value"),
    errors.ContextTooLong: _Kind(400, _INVALID, "context_length_exceeded"),
    errors.BadAdapter: _Kind(400, _INVALID),
    errors.UnsupportedAdapter: _Kind(400, _INVALID),
    errors.AdapterExists: _Kind(400, _INVALID),
    errors.NoTokenizer: _Kind(400, _INVALID),
    errors.Unauthorized: _Kind(401, _AUTH, "invalid_api_key"),
    errors.Forbidden: _Kind(403, _DENIED),
    errors.QuotaExceeded: _Kind(403, _DENIED),
    errors.UnknownAdapter: _Kind(404, _MISSING, "model_not_found"),
    job_errors.BadTrainingFile: _Kind(400, _INVALID),
    job_errors.BadPlan: _Kind(400, _INVALID),
    job_errors.WrongState: _Kind(400, _INVALID),
    job_errors.UnknownFile: _Kind(404, _MISSING),
    job_errors.UnknownJob: _Kind(404, _MISSING),
    job_errors.KeyReused: _Kind(409, _INVALID),
    job_errors.NameReserved: _Kind(409, _INVALID),
    job_errors.StorageFull: _Kind(507, _SERVER),
    errors.TooLarge: _Kind(413, _INVALID),
    errors.TooManyRequests: _Kind(429, _BUSY, "rate_limit_exceeded"),
    errors.EngineLost: _Kind(503, _SERVER),
    errors.Closed: _Kind(503, _SERVER),
}


class BadRequest(errors.SymbiosisError):
    """A body that is no request of this route; `field` says where."""

    code = "invalid_value"

    def __init__(self, message: str, *, field: str = "", code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


def _kind_of(error: Exception) -> _Kind:
    return _Kind(error.status, _INVALID) if isinstance(error, BadRequest) else _KINDS.get(type(error), _Kind(500, _SERVER))


def body_of(error: Exception) -> dict[str, dict[str, str | None]]:
    """`{"error": {message, type, param, code}}`. What is not an error of ours says nothing of what happened inside."""
    kind = _kind_of(error)
    known = isinstance(error, errors.SymbiosisError)
    if not known:
        _log.error("a request failed", exc_info=error)
    message = str(error) if known else "something failed inside the server; its log says what"
    code = kind.code or (error.code if isinstance(error, errors.SymbiosisError) else "internal_error")
    return {"error": {"message": message, "type": kind.type, "param": getattr(error, "field", "") or None, "code": code}}


def response_of(error: Exception) -> JSONResponse:
    status = _kind_of(error).status
    retry = math.ceil(error.retry_s) if isinstance(error, errors.TooManyRequests) else 5
    known = {429: {"Retry-After": str(max(1, retry))}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
    headers = known.get(status)
    return JSONResponse(body_of(error), status, headers)


def bad_request(found: ValidationError) -> BadRequest:
    """What pydantic found, as one sentence about the first field."""
    if found.error_count() > _MOST_FAULTS:
        return BadRequest(f"the body is wrong in {found.error_count()} places: expected the fields of this route and no others")
    all_found = found.errors(include_url=False, include_input=False)
    first = all_found[0]
    field = _field(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadRequest(f"{field} is not supported here: leave it out", field=field, code="unsupported_parameter")
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return BadRequest(f"the body is no JSON: {reason}", code="invalid_json")
    # a field that may be several kinds of things has an error for each
    said = (each["msg"].removeprefix("Value error, ") for each in all_found if _field(each["loc"]) == field)
    messages = list(dict.fromkeys(said))[:3]
    if all(each.startswith(_SHOULD) for each in messages):
        return BadRequest(
            f"{field or 'the body'} must be {', or '.join(each[len(_SHOULD) :] for each in messages)}", field=field
        )
    return BadRequest(f"{field or 'the body'}: {', or: '.join(messages)}", field=field)


def _field(place: tuple[int | str, ...]) -> str:
    """The way to a field, up to where pydantic names the branches of a union, such as `list[constrained-str]`."""
    names = []
    for part in place:
        if (isinstance(part, str) and not part.isidentifier()) or part in ("str", "int", "float"):
            break
        names.append(str(part))
    return ".".join(names)
