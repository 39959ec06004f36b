"""What a job says of itself. Each job that began ends once: trained, stopped or failed; one that did not is refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, slots=True)
class Begun:
    steps: int
    """Of the whole job."""


@dataclass(frozen=True, slots=True)
class Stepped:
    step: int
    total: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_s: float
    """Lately: steps are launched ahead, and done in bunches."""


@dataclass(frozen=True, slots=True)
class Validated:
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk."""

    step: int
    folder: str
    hash: str
    serves: str | None
    """The name it is served under now."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The end: the adapter is on disk, and served if that was asked for."""

    step: int
    loss: float | None
    """Of the last step; None if there was none to do."""
    folder: str
    hash: str
    generation: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The end: it can go on from the folder; None: it has to begin again."""

    step: int
    folder: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The end, with the last good checkpoint."""

    code: str
    message: str
    field: str | None
    step: int
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """It never began."""

    error: SymbiosisError


Event: TypeAlias = Begun | Stepped | Validated | Saved | Trained | Stopped | Failed | Refused

_NAMES = {
    Begun: "begun",
    Stepped: "step",
    Validated: "validation",
    Saved: "checkpoint",
    Trained: "trained",
    Stopped: "stopped",
    Failed: "failed",
}


def written(event: Event) -> dict[str, Any]:
    """As an object of its name and fields; not of `Refused`."""
    return {_NAMES[type(event)]: asdict(event)}
