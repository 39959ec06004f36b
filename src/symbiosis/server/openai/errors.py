"""Maps errors to HTTP responses of OpenAI's format. No other module does."""

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
_SHOULD_BE = "Input should be "  # pydantic
_MAX_ERRORS = 1000
"""pydantic lists all errors of a body or none, and listing is slow."""
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class _Mapping:
    status: int
    type: str
    code: str | None = None
    """OpenAI's code; None: the error's own."""


_MAPPINGS: dict[type[Exception], _Mapping] = {
    errors.OutOfRange: _Mapping(400, _INVALID, "invalid_value"),
    errors.ContextTooLong: _Mapping(400, _INVALID, "context_length_exceeded"),
    errors.BadAdapter: _Mapping(400, _INVALID),
    errors.UnsupportedAdapter: _Mapping(400, _INVALID),
    errors.AdapterExists: _Mapping(400, _INVALID),
    errors.NoTokenizer: _Mapping(400, _INVALID),
    errors.Unauthorized: _Mapping(401, _AUTH, "invalid_api_key"),
    errors.Forbidden: _Mapping(403, _DENIED),
    errors.QuotaExceeded: _Mapping(403, _DENIED),
    errors.UnknownAdapter: _Mapping(404, _MISSING, "model_not_found"),
    job_errors.BadTrainingFile: _Mapping(400, _INVALID),
    job_errors.BadPlan: _Mapping(400, _INVALID),
    job_errors.WrongState: _Mapping(400, _INVALID),
    job_errors.UnknownFile: _Mapping(404, _MISSING),
    job_errors.UnknownJob: _Mapping(404, _MISSING),
    job_errors.KeyReused: _Mapping(409, _INVALID),
    job_errors.NameReserved: _Mapping(409, _INVALID),
    job_errors.StorageFull: _Mapping(507, _SERVER),
    errors.TooLarge: _Mapping(413, _INVALID),
    errors.TooManyRequests: _Mapping(429, _BUSY, "rate_limit_exceeded"),
    errors.EngineLost: _Mapping(503, _SERVER),
    errors.Closed: _Mapping(503, _SERVER),
}


class BadRequest(errors.SymbiosisError):
    """An invalid request; `field` names the place."""

    code = "invalid_value"

    def __init__(self, message: str, *, field: str = "", code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


def _find_mapping(error: Exception) -> _Mapping:
    if isinstance(error, BadRequest):
        return _Mapping(error.status, _INVALID)
    return _MAPPINGS.get(type(error), _Mapping(500, _SERVER))


def error_body(error: Exception) -> dict[str, dict[str, str | None]]:
    """`{"error": {message, type, param, code}}`. Internal errors are logged and not shown."""
    mapping = _find_mapping(error)
    if isinstance(error, errors.SymbiosisError):
        message, code = str(error), mapping.code or error.code
    else:
        _log.error("a request failed", exc_info=error)
        message, code = "internal server error: see the server's log", "internal_error"
    return {"error": {"message": message, "type": mapping.type, "param": getattr(error, "field", "") or None, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    status = _find_mapping(error).status
    retry_s = math.ceil(error.retry_s) if isinstance(error, errors.TooManyRequests) else 5
    headers = {429: {"Retry-After": str(max(1, retry_s))}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(error_body(error), status, headers.get(status))


def to_bad_request(error: ValidationError) -> BadRequest:
    """pydantic's errors as one sentence about the first field."""
    if error.error_count() > _MAX_ERRORS:
        return BadRequest(f"the body has {error.error_count()} errors: expected the fields of this route and no others")
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    field = _join_location(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadRequest(f"{field} is not supported here: leave it out", field=field, code="unsupported_parameter")
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    # A field of a union type has an error for each branch.
    messages = (each["msg"].removeprefix("Value error, ") for each in found if _join_location(each["loc"]) == field)
    shown, name = list(dict.fromkeys(messages))[:3], field or "the body"
    if all(message.startswith(_SHOULD_BE) for message in shown):
        return BadRequest(f"{name} must be {', or '.join(message[len(_SHOULD_BE) :] for message in shown)}", field=field)
    return BadRequest(f"{name}: {', or: '.join(shown)}", field=field)


def _join_location(location: tuple[int | str, ...]) -> str:
    """The dotted path of a field, without the union branches that pydantic adds, such as `list[constrained-str]`."""
    names = []
    for part in location:
        if (isinstance(part, str) and not part.isidentifier()) or part in ("str", "int", "float"):
            break
        names.append(str(part))
    return ".".join(names)
