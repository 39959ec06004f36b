"""What may be asked of fine-tuning. As in `schemas`: all is bounded, and what we would not act on is refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from symbiosis.jobs.plan import Hyperparameters
from symbiosis.server.openai.schemas import Name, Strict

_MAX_ADAPTER = 64 << 10
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Auto: TypeAlias = Literal["auto"] | None
FileId = Annotated[str, Field(min_length=1, max_length=128)]
Target = Annotated[str, Field(min_length=1, max_length=512)]


class HyperparameterFields(Strict):
    """OpenAI's three, and ours. None and "auto" are the same."""

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
    def _is_small(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            written = json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            raise ValueError("has NaN or infinity, or is nested too deeply") from None
        if len(written) > _MAX_ADAPTER:
            raise ValueError(f"has more than {_MAX_ADAPTER} bytes")
        return value


class SupervisedFields(Strict):
    hyperparameters: HyperparameterFields | None = None


class MethodFields(Strict):
    type: Literal["supervised"]
    supervised: SupervisedFields | None = None


class CreateJobRequest(Strict):
    """POST /v1/fine_tuning/jobs."""

    model: Name
    training_file: FileId
    validation_file: FileId | None = None
    method: MethodFields | None = None
    hyperparameters: HyperparameterFields | None = None
    suffix: str | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    integrations: list[Any] | None = None

    @field_validator("integrations")
    @classmethod
    def _has_none(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("none is supported here: leave it out")
        return value

    @field_validator("suffix")
    @classmethod
    def _fits_a_name(cls, value: str | None) -> str | None:
        if value is not None and not _SUFFIX.fullmatch(value):
            raise ValueError("expected 1 to 64 letters, digits, dots, dashes and underscores, first a letter or digit")
        return value

    @model_validator(mode="after")
    def _once(self) -> CreateJobRequest:
        if self.hyperparameters is not None and self.method is not None and self._inner() is not None:
            raise ValueError("hyperparameters stand in method or beside it, not both")
        return self

    def _inner(self) -> HyperparameterFields | None:
        return None if self.method is None or self.method.supervised is None else self.method.supervised.hyperparameters

    def wishes(self) -> Hyperparameters:
        given = (self.hyperparameters or self._inner() or HyperparameterFields()).model_dump()
        decided = {name: None if value == "auto" else value for name, value in given.items()}
        return Hyperparameters(**decided)


class Page(Strict):
    """Of a list."""

    after: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilesPage(Page):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str, Field(max_length=64)] | None = None
