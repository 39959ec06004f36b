"""Base classes of request schemas: unknown fields are errors, and so are values that are not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

UNSUPPORTED = "unsupported"
"""pydantic's type of an error of `Only`."""


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NullableModel(StrictModel):
    """An unknown field may be null: it requests nothing."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, None] = Field(init=False)


@dataclass(frozen=True, slots=True)
class Only:
    """Annotates a field that may be null or one of these values; `reason` explains why not another."""

    values: tuple[Any, ...]
    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.values]}

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in self.values):
            return value
        raise PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": self.reason})
