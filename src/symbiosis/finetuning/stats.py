"""Counters of the trainer and of its jobs. A snapshot is immutable, so any thread may read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


class _Counters:
    __slots__ = ()

    def add(self, **amounts: float) -> Self:
        """A new snapshot with these counters increased."""
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class TrainerStats(_Counters):
    passes: int = 0
    rows: int = 0
    sessions: int = 0
    """Summed over passes: one pass of 8 sessions counts 8."""
    seconds: float = 0.0
    """Spent in passes."""
    serving_passes: int = 0
    """Passes while the engine served; the counters above include them."""
    serving_rows: int = 0
    serving_seconds: float = 0.0
    new_passes: int = 0
    """Passes of a new shape, which the GPU had to compile or capture."""
    steps: int = 0
    """Optimizer steps."""


@dataclass(frozen=True, slots=True)
class JobRunnerStats(_Counters):
    running: int = 0
    trained: int = 0
    stopped: int = 0
    failed: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    """Labels of finished steps."""
