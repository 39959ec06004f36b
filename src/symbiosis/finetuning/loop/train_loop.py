"""A whole fine-tuning run over a session's calls, with the results of transformers' Trainer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from symbiosis.errors import OutOfRange, SymbiosisError, TooManyRequests, Withdrawn
from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot
from symbiosis.finetuning.calls import LossResult, StepResult
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.packed.batch import count_target_tokens
from symbiosis.finetuning.session import TrainingSession

_T = TypeVar("_T")
_STEPS_AHEAD = 2  # submitted at once: the trainer does not wait for this thread
_MAX_RETRIES = 1000  # while other sessions of the tenant use its whole quota


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A finished step of a run."""

    step: int
    """From 1 on."""
    total: int
    loss: float
    """The mean over the labels of all its batches."""
    learning_rate: float
    gradient_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Validation:
    """Held-out examples whose loss is computed during the run."""

    data: Sequence[Example]
    every: int | None
    """After every so many steps, and after the last; None: after the last."""
    on_loss: Callable[[int, float], None]
    """Called with the step and the mean over all labels."""

    def is_due(self, step: int, total: int) -> bool:
        return step == total or (self.every is not None and step % self.every == 0)

    def submit(self, calls: _SubmittedCalls) -> list[Future[LossResult]]:
        session = calls.session
        items = sum(count_target_tokens(session.adapter, example) for example in self.data)
        return [calls.submit(partial(session.forward, batch, items=items)) for batch in session.batches(self.data)]


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    losses: list[Future[LossResult]]
    stepped: Future[StepResult]
    learning_rate: float
    validation_losses: list[Future[LossResult]]
    saved: Future[None] | None
    snapshots: list[AdapterSnapshot]

    def wait(self, total: int) -> LoopResult:
        losses, step = [future.result() for future in self.losses], self.stepped.result()
        loss, tokens = sum(each.loss for each in losses), sum(each.tokens for each in losses)
        return LoopResult(step.number, total, loss, self.learning_rate, step.gradient_norm, tokens)


class _SubmittedCalls:
    """Unresolved calls of a session. When its quota is used up, `submit` waits for the oldest call, then for the tenant."""

    def __init__(self, session: TrainingSession) -> None:
        self.session = session
        self._unresolved: deque[Future[Any]] = deque()

    def submit(self, call: Callable[[], Future[_T]]) -> Future[_T]:
        unresolved = self._unresolved
        if unresolved and unresolved[-1].done() and isinstance(error := unresolved[-1].exception(), Withdrawn):
            raise error  # this call belongs to the same step, or to a later one
        while unresolved and unresolved[0].done():
            unresolved.popleft()
        retries = _MAX_RETRIES
        while True:
            try:
                unresolved.append(future := call())
            except TooManyRequests as error:
                self.session.begin()
                if unresolved:
                    wait([unresolved.popleft()])
                elif retries > 0:
                    retries -= 1
                    time.sleep(error.retry_s)
                else:
                    raise
            else:
                return future


def _batch_items(session: TrainingSession, data: Sequence[Example], batches: list[list[int]]) -> list[int]:
    """The divisor of each batch's loss, as in Trainer."""
    if session.takes_items:
        return [sum(data[number].labelled for batch in batches for number in batch)] * len(batches)
    return [len(batches) * sum(count_target_tokens(session.adapter, data[number]) for number in batch) for batch in batches]


def run(
    session: TrainingSession,
    data: Sequence[Example],
    recipe: Recipe,
    *,
    after: int = 0,
    on_step: Callable[[LoopResult], None] | None = None,
    checkpoint: Callable[[int], Path | None] | None = None,
    on_saved: Callable[[int, AdapterSnapshot], None] | None = None,
    validation: Validation | None = None,
) -> LoopResult | None:
    """Train until the recipe's end, or until the session is stopped. Returns the last step, None if there was none.

    `checkpoint` maps a step to the folder to save it to (replaced if it exists), or None; `on_saved` is called when that is
    on disk. Callbacks run on this thread, in order. `after` steps were done before, and the session was loaded from their
    checkpoint. Raises what ends the session; `OutOfRange` before the first step if an example is invalid.
    """
    if not data:
        raise OutOfRange("there is nothing to learn from", field="data", expected="one example at least")
    session.check(data)
    total = recipe.total_steps(len(data))
    calls, submitted = _SubmittedCalls(session), deque[_SubmittedStep]()
    last: LoopResult | None = None

    def finish_step() -> LoopResult:
        step = submitted.popleft()
        result = step.wait(total)
        if on_step is not None:
            on_step(result)
        if validation is not None and step.validation_losses:
            validation.on_loss(result.step, sum(each.result().loss for each in step.validation_losses))
        if step.saved is not None:
            step.saved.result()
            if on_saved is not None:
                on_saved(result.step, step.snapshots.pop())
        return result

    def submit_step(step: int, batches: list[list[int]]) -> _SubmittedStep:
        settings = recipe.step_settings(step - 1, total)
        with session.gathering():
            losses = [  # each batch is created when the queue has capacity: a step may not fit into memory
                calls.submit(partial(session.forward_backward, [data[number] for number in batch], items=items))
                for batch, items in zip(batches, _batch_items(session, data, batches), strict=True)
            ]
            stepped = calls.submit(partial(session.optim_step, settings))
        is_due = validation is not None and validation.is_due(step, total)
        validation_losses = validation.submit(calls) if validation is not None and is_due else []
        folder, saved, snapshots = checkpoint(step) if checkpoint is not None else None, None, list[AdapterSnapshot]()
        if folder is not None:
            saved = calls.submit(partial(session.save, folder, optimizer=True, replace=True, keep=snapshots.append))
        return _SubmittedStep(losses, stepped, settings.learning_rate, validation_losses, saved, snapshots)

    try:
        with suppress(Withdrawn):  # the session was stopped before this step; an earlier one may be running
            for step, batches in enumerate(recipe.steps(len(data), after=after), after + 1):
                submitted.append(submit_step(step, batches))
                if len(submitted) >= _STEPS_AHEAD:
                    last = finish_step()
        with suppress(Withdrawn):
            while submitted:
                last = finish_step()
    except SymbiosisError:
        with suppress(SymbiosisError):
            while submitted and submitted[0].stepped.done():
                finish_step()  # it was done before the error: the callbacks report it
        raise
    return last
