"""What a session is asked to do. Each call has a number and one answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.sampler_protocol import PendingAnswers
from symbiosis.finetuning.trained_adapter import AdapterSnapshot


@dataclass(frozen=True, slots=True)
class LossResult:
    """The answer to forward_backward and forward."""

    loss: float
    """Over all its examples: the mean over the labels, or their sum over what the caller said."""
    tokens: int
    """Labels that were learned from."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to optim_step."""

    number: int
    """Of the step, from 1 on."""
    gradient_norm: float
    """Before it was clipped."""


def _future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a call that was accepted is answered: nobody cancels it
    return future


class _Small:
    """A call that may be remembered as it is."""

    __slots__ = ()

    @property
    def size(self) -> int:
        """Tokens that it holds."""
        return 0

    @property
    def answers(self) -> int:
        """That the engine computes for it."""
        return 0

    @property
    def kept(self) -> int:
        """Tokens that it holds when it is answered."""
        return 0

    def forget(self) -> None:
        """Once it is answered: keep nothing large."""


@dataclass(slots=True, eq=False)
class ForwardBackward(_Small):
    examples: tuple[Example, ...]
    costs: tuple[int, ...]
    """Of each example, in rows of a pass."""
    items: float
    tokens: int
    digest: bytes
    """Of all that was asked for: it is remembered longer than the examples."""
    learns: bool = True
    """Whether gradients are wanted; else it is `forward`: nothing is learned, and nothing dropped."""
    begins: bool = False
    """Whether it is the first of a step."""
    losses: list[float] = field(default_factory=list)
    """Of the examples that were computed."""
    answer: Future[Any] = field(default_factory=_future)

    def same(self, other: object) -> bool:
        return isinstance(other, ForwardBackward) and (self.digest, self.learns) == (other.digest, other.learns)

    @property
    def size(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    def forget(self) -> None:
        self.examples, self.costs, self.losses = (), (), []


@dataclass(slots=True, eq=False)
class OptimStep(_Small):
    settings: StepSettings
    answer: Future[Any] = field(default_factory=_future)

    def same(self, other: object) -> bool:
        return isinstance(other, OptimStep) and self.settings == other.settings


@dataclass(slots=True, eq=False)
class SaveCheckpoint(_Small):
    folder: Path
    optimizer: bool
    replace: bool = False
    keep: Callable[[AdapterSnapshot], None] | None = None
    """Told what was written, once it is on disk."""
    answer: Future[Any] = field(default_factory=_future)

    def same(self, other: object) -> bool:
        return isinstance(other, SaveCheckpoint) and (self.folder, self.optimizer) == (other.folder, other.optimizer)

    def forget(self) -> None:
        self.keep = None


@dataclass(slots=True, eq=False)
class LoadCheckpoint(_Small):
    folder: Path
    answer: Future[Any] = field(default_factory=_future)

    def same(self, other: object) -> bool:
        return isinstance(other, LoadCheckpoint) and self.folder == other.folder


class SampleCall(_Small):
    """It leaves its line when the adapter was copied; its answers come later."""

    __slots__ = ("_kept", "answer", "asked", "key")

    def __init__(self, asked: PendingAnswers) -> None:
        self.asked: PendingAnswers | None = asked
        """None: it is answered."""
        self.key, self._kept, self.answer = asked.key, asked.tokens, _future()

    def same(self, other: object) -> bool:
        return isinstance(other, SampleCall) and self.key == other.key

    @property
    def size(self) -> int:
        return 0 if self.asked is None else self.asked.tokens

    @property
    def answers(self) -> int:
        return 0 if self.asked is None else self.asked.answers

    @property
    def kept(self) -> int:
        return self._kept

    def forget(self) -> None:
        self.asked = None


Call = ForwardBackward | OptimStep | SaveCheckpoint | LoadCheckpoint | SampleCall
