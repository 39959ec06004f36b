"""Maps errors to HTTP responses of OpenAI's format. No other module does."""

from __future__ import annotations

import logging
import math

from pydantic import ValidationError
from starlette.responses import JSONResponse

from symbiosis import errors
from symbiosis.jobs import errors as job_errors
from symbiosis.server.openai.strict_model import UNSUPPORTED

_SHOULD_BE = "Input should be "  # pydantic
_SENTENCES = {
    "missing": "is missing: add it; /openapi.json describes the fields of each route",
    "too_short": "has {actual_length} items: expected at least {min_length}",
    "too_long": "has too many items: expected at most {max_length}",
    "string_too_short": "is too short: expected at least {min_length} characters",
    "string_too_long": "is too long: expected at most {max_length} characters",
    "string_pattern_mismatch": "does not match the pattern {pattern}",
}
"""By pydantic's type of an error, what is said in place of its message."""
_MAX_ERRORS = 1000
"""pydantic lists all errors of a body or none, and listing is slow."""
_log = logging.getLogger("symbiosis")


_STATUSES: dict[int, tuple[type[Exception], ...]] = {
    400: (
        *(errors.OutOfRange, errors.ContextTooLong, errors.BadAdapter, errors.UnsupportedAdapter, errors.AdapterExists),
        *(errors.NoTokenizer, job_errors.BadTrainingFile, job_errors.BadPlan, job_errors.WrongState),
    ),
    401: (errors.Unauthorized,),
    403: (errors.Forbidden, errors.QuotaExceeded),
    404: (errors.UnknownAdapter, job_errors.UnknownFile, job_errors.UnknownJob),
    409: (job_errors.KeyReused, job_errors.NameReserved),
    413: (errors.TooLarge, errors.DoesNotFit),
    429: (errors.TooManyRequests,),
    503: (errors.EngineLost, errors.Closed, errors.StoreUnavailable),
    507: (job_errors.StorageFull, errors.StoreFull),
}
_STATUS_OF = {kind: status for status, kinds in _STATUSES.items() for kind in kinds}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OPENAI_CODES: dict[type[Exception], str] = {
    errors.OutOfRange: "invalid_value",
    errors.ContextTooLong: "context_length_exceeded",
    errors.Unauthorized: "invalid_api_key",
    errors.UnknownAdapter: "model_not_found",
    errors.TooManyRequests: "rate_limit_exceeded",
}
"""Codes that clients of OpenAI know; other errors have their own."""


class BadRequest(errors.SymbiosisError):
    """An invalid request; `field` names the place."""

    code = "invalid_value"

    def __init__(self, message: str, *, field: str = "", code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


def _find_status(error: Exception) -> int:
    return error.status if isinstance(error, BadRequest) else _STATUS_OF.get(type(error), 500)


def error_body(error: Exception) -> dict[str, dict[str, str | None]]:
    """`{"error": {message, type, param, code}}`. Internal errors are logged and not shown."""
    status = _find_status(error)
    kind = "invalid_request_error"
    if not isinstance(error, BadRequest):
        kind = _TYPES.get(status, kind if status < 500 else "server_error")
    if isinstance(error, errors.SymbiosisError):
        message, code = str(error), _OPENAI_CODES.get(type(error), error.code)
    else:
        _log.error("a request failed", exc_info=error)
        message, code = "internal server error: see the server's log", "internal_error"
    return {"error": {"message": message, "type": kind, "param": getattr(error, "field", "") or None, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    status = _find_status(error)
    retry_s = math.ceil(error.retry_s) if isinstance(error, errors.TooManyRequests) else 5
    headers = {429: {"Retry-After": str(max(1, retry_s))}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(error_body(error), status, headers.get(status))


def unknown_model(model: str) -> errors.UnknownAdapter:
    return errors.UnknownAdapter(f"there is no model {model!r} here: GET /v1/models (`symbiosis adapters list`) lists yours")


def no_such_path(path: str) -> str:
    return f"there is no {path:.200}: GET /openapi.json lists the paths of this server"


def to_bad_request(error: ValidationError) -> BadRequest:
    """pydantic's errors as one sentence about the first field."""
    if error.error_count() > _MAX_ERRORS:
        return BadRequest(f"the body has {error.error_count()} errors: expected the fields of this route and no others")
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    field = _join_location(first["loc"])
    if first["type"] in ("extra_forbidden", "none_required"):  # an unknown field may be null
        return BadRequest(f"{field} is not supported here: leave it out", field=field, code="unsupported_parameter")
    if first["type"] == UNSUPPORTED:
        return BadRequest(f"{field}: {first['msg']}", field=field, code="unsupported_parameter")
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    # A field of a union type has an error for each branch. One about its size is of the branch that the value is meant for.
    same = [each for each in found if _join_location(each["loc"]) == field]
    for each in same:
        if (sentence := _SENTENCES.get(each["type"])) is not None:
            return BadRequest(f"{field or 'the body'} {sentence.format(**each.get('ctx', {}))}", field=field)
    messages = (each["msg"].removeprefix("Value error, ") for each in same)
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
