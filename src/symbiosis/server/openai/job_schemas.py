"""Schemas of fine-tuning requests. As in `schemas`, everything is bounded and unsupported values are rejected."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from symbiosis.jobs.plan import Hyperparameters
from symbiosis.server.openai.ignored_fields import Metadata
from symbiosis.server.openai.schemas import Name
from symbiosis.server.openai.strict_model import NullableModel, StrictModel

_MAX_ADAPTER_BYTES = 64 << 10
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Auto: TypeAlias = Literal["auto"] | None
FileId = Annotated[str, Field(min_length=1, max_length=128)]
Target = Annotated[str, Field(min_length=1, max_length=512)]


class HyperparameterFields(StrictModel):
    """OpenAI's three fields and extensions. None equals "auto"."""

    n_epochs: Annotated[float, Field(gt=0, le=1000)] | Auto = None
    batch_size: Annotated[int, Field(ge=1, le=1024)] | Auto = None
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000)] | Auto = None
    n_steps: Annotated[int, Field(ge=1, le=10_000_000)] | Auto = None
    learning_rate: Annotated[float, Field(gt=0, le=100)] | Auto = None
    gradient_accumulation: Annotated[int, Field(ge=1, le=1024)] | Auto = None
    scheduler: Literal["auto", "linear", "cosine", "constant", "constant_with_warmup"] | None = None
    warmup: Annotated[float, Field(ge=0, le=1_000_000)] | Auto = None
    weight_decay: Annotated[float, Field(ge=0, le=1)] | Auto = None
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)] | Auto = None
    peft_method: Annotated[str, Field(max_length=64)] | None = None
    rank: Annotated[int, Field(ge=1, le=512)] | Auto = None
    alpha: Annotated[float, Field(gt=0, le=1e6)] | Auto = None
    targets: Annotated[list[Target], Field(min_length=1, max_length=256)] | Literal["all-linear"] | Auto = None
    virtual_tokens: Annotated[int, Field(ge=1, le=4096)] | Auto = None
    adapter: dict[str, Any] | None = None
    """A PEFT config."""
    max_length: Annotated[int, Field(ge=2, le=1 << 20)] | Auto = None
    truncate: bool | None = None
    checkpoint_every: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = None
    evaluate_every: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = None
    serve_checkpoints: bool | None = None

    @field_validator("adapter")
    @classmethod
    def _check_size(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            encoded = json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            raise ValueError("has NaN or infinity, or is nested too deeply") from None
        if len(encoded) > _MAX_ADAPTER_BYTES:
            raise ValueError(f"has more than {_MAX_ADAPTER_BYTES} bytes")
        return value


class SupervisedFields(NullableModel):
    hyperparameters: HyperparameterFields | None = None


class MethodFields(NullableModel):
    type: Literal["supervised"]
    supervised: SupervisedFields | None = None


class CreateJobRequest(NullableModel):
    """POST /v1/fine_tuning/jobs."""

    model: Name
    training_file: FileId
    validation_file: FileId | None = None
    method: MethodFields | None = None
    hyperparameters: HyperparameterFields | None = None
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: Metadata | None = None
    integrations: list[Any] | None = None

    @field_validator("integrations")
    @classmethod
    def _check_integrations(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("not supported: leave it out")
        return value

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, value: str | None) -> str | None:
        if value is not None and not _SUFFIX.fullmatch(value):
            raise ValueError("expected 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit")
        return value

    @model_validator(mode="after")
    def _check_hyperparameters(self) -> CreateJobRequest:
        if self.hyperparameters is not None and self.method is not None and self._nested() is not None:
            raise ValueError("give hyperparameters or method.supervised.hyperparameters, not both")
        return self

    def _nested(self) -> HyperparameterFields | None:
        return None if self.method is None or self.method.supervised is None else self.method.supervised.hyperparameters

    def to_hyperparameters(self) -> Hyperparameters:
        fields = (self.hyperparameters or self._nested() or HyperparameterFields()).model_dump()
        return Hyperparameters(**{name: None if value == "auto" else value for name, value in fields.items()})


class Page(StrictModel):
    """Query parameters of a paginated list."""

    after: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilesPage(Page):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str, Field(max_length=64)] | None = None
