"""Query parameters by their schema."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from symbiosis.server.openai.errors import BadRequest, to_bad_request
from symbiosis.server.openai.strict_model import StrictModel

_Schema = TypeVar("_Schema", bound=StrictModel)


def read_query(request: Request, schema: type[_Schema]) -> _Schema:
    """Raises `BadRequest` for unknown, repeated or invalid parameters."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in schema.model_fields or name in values:
            raise BadRequest(f"{name!r:.60} is not supported here: leave it out", field=name[:60], code="unsupported_parameter")
        values[name] = int(value) if name == "limit" and re.fullmatch(r"-?[0-9]{1,18}", value) else value
    try:
        return schema(**values)
    except ValidationError as error:
        raise to_bad_request(error) from None


def reject_query(request: Request) -> None:
    """Raises `BadRequest` for any parameter."""
    read_query(request, StrictModel)
