"""Events of a job. A job that began ends with exactly one of succeeded, stopped and failed; else it is rejected.

`kind` is the event's name in messages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, slots=True)
class JobStarted:
    kind: ClassVar = "begun"
    steps: int
    """Of the whole job."""


@dataclass(frozen=True, slots=True)
class StepDone:
    kind: ClassVar = "step"
    step: int
    total: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_s: float
    """A recent mean: steps are launched ahead and finish in groups."""


@dataclass(frozen=True, slots=True)
class ValidationDone:
    kind: ClassVar = "validation"
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    kind: ClassVar = "checkpoint"
    step: int
    folder: str
    hash: str
    serves: str | None
    """The name it is served under."""


@dataclass(frozen=True, slots=True)
class JobSucceeded:
    """The adapter is on disk, and served if the job has a name for it."""

    kind: ClassVar = "trained"
    step: int
    loss: float | None
    """Of the last step; None if no step was left to do."""
    folder: str
    hash: str
    generation: int | None


@dataclass(frozen=True, slots=True)
class JobStopped:
    kind: ClassVar = "stopped"
    step: int
    folder: str | None
    """The checkpoint to resume from; None: the job starts again."""


@dataclass(frozen=True, slots=True)
class JobFailed:
    kind: ClassVar = "failed"
    code: str
    message: str
    field: str | None
    step: int
    checkpoint: str | None
    """The last good one."""


@dataclass(frozen=True, slots=True)
class JobRejected:
    """The job did not begin."""

    kind: ClassVar = "refused"
    error: SymbiosisError


JobEnd: TypeAlias = JobSucceeded | JobStopped | JobFailed | JobRejected
Event: TypeAlias = JobStarted | StepDone | ValidationDone | CheckpointSaved | JobEnd


def to_message(event: Event) -> dict[str, Any]:
    """The event's fields under its kind; not for `JobRejected`."""
    return {event.kind: asdict(event)}
