"""What a job says of itself. Each job that began ends once: trained, stopped or failed; one that did not is refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, slots=True)
class JobStarted:
    steps: int
    """Of the whole job."""


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int
    total: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_s: float
    """Lately: steps are launched ahead, and done in bunches."""


@dataclass(frozen=True, slots=True)
class ValidationDone:
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    step: int
    folder: str
    hash: str
    serves: str | None
    """The name it is served under now."""


@dataclass(frozen=True, slots=True)
class JobSucceeded:
    """The end: the adapter is on disk, and served if that was asked for."""

    step: int
    loss: float | None
    """Of the last step; None if there was none to do."""
    folder: str
    hash: str
    generation: int | None


@dataclass(frozen=True, slots=True)
class JobStopped:
    """The end: it can go on from the folder; None: it has to begin again."""

    step: int
    folder: str | None


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The end, with the last good checkpoint."""

    code: str
    message: str
    field: str | None
    step: int
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class JobRejected:
    """It never began."""

    error: SymbiosisError


Event: TypeAlias = (
    JobStarted | StepDone | ValidationDone | CheckpointSaved | JobSucceeded | JobStopped | JobFailed | JobRejected
)

_NAMES = {
    JobStarted: "begun",
    StepDone: "step",
    ValidationDone: "validation",
    CheckpointSaved: "checkpoint",
    JobSucceeded: "trained",
    JobStopped: "stopped",
    JobFailed: "failed",
}


def written(event: Event) -> dict[str, Any]:
    """As an object of its name and fields; not of `JobRejected`."""
    return {_NAMES[type(event)]: asdict(event)}
