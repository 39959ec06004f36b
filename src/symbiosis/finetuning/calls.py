"""Calls of a training session. A call is submitted, queued, run and resolved: its future is set exactly once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot
from symbiosis.finetuning.examples import Example, digest_batch
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.sampler_protocol import SampleRequest


@dataclass(frozen=True, slots=True)
class LossResult:
    """The result of forward_backward and forward."""

    loss: float
    """Over all examples: the mean over the labels, or their sum divided by `items`."""
    tokens: int
    """Labels that count."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of optim_step."""

    number: int
    """Of the optimizer step, from 1 on."""
    gradient_norm: float
    """Before clipping."""


class SessionCall:
    """`tokens` and `completions` count against the limits until the call is released."""

    def __init__(self, *key: object, tokens: int = 0, completions: int = 0, result_tokens: int = 0) -> None:
        self.key = (type(self), *key)
        """Equal for a retry of the same call. It is stored longer than the payload."""
        self.tokens, self.completions, self.result_tokens = tokens, completions, result_tokens
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # an accepted call cannot be cancelled

    def resolve(self, outcome: Any) -> None:
        """Set the result, or the error if it is an exception. Only the first outcome counts."""
        with suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome.with_traceback(None))
            else:
                self.future.set_result(outcome)

    def release(self) -> None:
        """Drop the payload of a finished call, which stays known for retries."""


class ForwardBackward(SessionCall):
    def __init__(
        self, examples: tuple[Example, ...], costs: tuple[int, ...], items: float, labels: int, *, learns: bool
    ) -> None:
        """`costs`: rows of a pass for each example. `learns` is False for `forward`: no gradients and no dropout."""
        super().__init__(digest_batch(examples, items), learns, tokens=sum(len(example.ids) for example in examples))
        self.examples, self.costs, self.items, self.labels, self.learns = examples, costs, items, labels, learns
        self.starts_step = False
        """Whether it is the first batch of an optimizer step."""
        self.losses: list[float] = []
        """Of the examples computed so far."""

    def release(self) -> None:
        self.examples, self.costs, self.losses = (), (), []


class OptimStep(SessionCall):
    def __init__(self, settings: StepSettings) -> None:
        super().__init__(settings)
        self.settings = settings


class SaveCheckpoint(SessionCall):
    def __init__(self, folder: Path, *, optimizer: bool, replace: bool, keep: Callable[[AdapterSnapshot], None] | None) -> None:
        super().__init__(folder, optimizer)
        self.folder, self.optimizer, self.replace = folder, optimizer, replace
        self.keep = keep
        """Called with what was written, once it is on disk."""

    def release(self) -> None:
        self.keep = None


class LoadCheckpoint(SessionCall):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder


class SampleCall(SessionCall):
    """Leaves the queue when the adapter is copied. The completions follow later."""

    def __init__(self, request: SampleRequest) -> None:
        super().__init__(request.key, tokens=request.tokens, completions=request.completions, result_tokens=request.tokens)
        self.request: SampleRequest | None = request
        """None after the call is released."""

    def release(self) -> None:
        self.request = None


BackgroundCall: TypeAlias = SaveCheckpoint | LoadCheckpoint | SampleCall
"""Runs outside of passes."""
