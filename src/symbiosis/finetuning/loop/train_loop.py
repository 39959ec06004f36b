"""A whole fine-tuning run over a session's calls, as transformers' Trainer would do it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from symbiosis.errors import OutOfRange, SymbiosisError, TooManyRequests, Withdrawn
from symbiosis.finetuning.calls import LossResult, StepResult
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.packed.batch import count_target_tokens
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.trained_adapter import AdapterSnapshot

_T = TypeVar("_T")
_AHEAD = 2  # steps under way, so that the host need not wait for this thread to wake up
_PATIENCE = 1000  # times that a tenant's other sessions may have left no room


@dataclass(frozen=True, slots=True)
class LoopResult:
    """A step of a job."""

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
    """Examples that are not learned from: how well does the adapter do with them?"""

    data: Sequence[Example]
    every: int | None
    """After every so many steps, and after the last; None: after the last."""
    on_loss: Callable[[int, float], None]
    """Told the step and the mean over all labels."""

    def is_due(self, step: int, total: int) -> bool:
        return step == total or (self.every is not None and step % self.every == 0)

    def ask(self, session: TrainingSession, asked: _Asked) -> list[Future[LossResult]]:
        items = sum(count_target_tokens(session.adapter, example) for example in self.data)
        return [asked.ask(session, partial(session.forward, batch, items=items)) for batch in session.batches(self.data)]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that was asked for."""

    losses: list[Future[LossResult]]
    stepped: Future[StepResult]
    learning_rate: float
    evaluated: list[Future[LossResult]] = field(default_factory=list)
    saved: Future[None] | None = None
    kept: list[AdapterSnapshot] = field(default_factory=list)

    def done(self, total: int) -> LoopResult:
        """Waits for its answers."""
        losses, step = [future.result() for future in self.losses], self.stepped.result()
        loss, tokens = sum(each.loss for each in losses), sum(each.tokens for each in losses)
        return LoopResult(step.number, total, loss, self.learning_rate, step.gradient_norm, tokens)


class _Asked:
    """Calls without an answer yet. When a session takes no more, the oldest is waited for; with none, the tenant's others."""

    def __init__(self) -> None:
        self._open: deque[Future[Any]] = deque()

    def ask(self, session: TrainingSession, call: Callable[[], Future[_T]]) -> Future[_T]:
        if self._open and self._open[-1].done() and isinstance(error := self._open[-1].exception(), Withdrawn):
            raise error  # what follows belongs to the same step, or to a later one
        while self._open and self._open[0].done():
            self._open.popleft()
        patience = _PATIENCE
        while True:
            try:
                self._open.append(future := call())
            except TooManyRequests as error:
                session.begin()
                if self._open:
                    wait([self._open.popleft()])
                elif patience > 0:
                    patience -= 1
                    time.sleep(error.retry_s)
                else:
                    raise
            else:
                return future


def _items(session: TrainingSession, data: Sequence[Example], batches: list[list[int]]) -> list[int]:
    """What the losses of each batch of a step are divided by, as Trainer does it."""
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
    """Train until the recipe's end, or until the session is stopped; returns the last step, None if there was none.

    `checkpoint` is asked after which steps to save the session, and where (what is there is replaced); `on_saved` is told
    when that is on disk. All that is told is told in order, by this thread. `after` steps have been done before, and
    the session was loaded from where they ended. Raises what ends the session; `OutOfRange` before the first step if
    an example cannot be trained on.
    """
    if not data:
        raise OutOfRange("there is nothing to learn from", field="data", expected="one example at least")
    session.check(data)
    total = recipe.total(len(data))
    under_way: deque[_UnderWay] = deque()
    asked = _Asked()
    last: LoopResult | None = None

    def finish() -> LoopResult:
        first = under_way.popleft()
        done = first.done(total)
        if on_step is not None:
            on_step(done)
        if validation is not None and first.evaluated:
            validation.on_loss(done.step, sum(each.result().loss for each in first.evaluated))
        if first.saved is not None:
            first.saved.result()
            if on_saved is not None:
                on_saved(done.step, first.kept.pop())
        return done

    def ask(step: int, batches: list[list[int]]) -> _UnderWay:
        settings = recipe.settings(step - 1, total)
        with session.gathering():
            losses = [  # a batch is made when there is room for it: those of a step may be more than fits in memory
                asked.ask(session, partial(session.forward_backward, [data[number] for number in batch], items=items))
                for batch, items in zip(batches, _items(session, data, batches), strict=True)
            ]
            stepped = asked.ask(session, partial(session.optim_step, settings))
        due = validation is not None and validation.is_due(step, total)
        evaluated = validation.ask(session, asked) if validation is not None and due else []
        kept: list[AdapterSnapshot] = []
        folder = checkpoint(step) if checkpoint is not None else None
        saved = None
        if folder is not None:
            save = partial(session.save, folder, optimizer=True, replace=True, keep=kept.append)
            saved = asked.ask(session, save)
        return _UnderWay(losses, stepped, settings.learning_rate, evaluated, saved, kept)

    try:
        with suppress(Withdrawn):  # the session was stopped, and this step was not begun; one before it may be under way
            for step, batches in enumerate(recipe.batches(len(data), after=after), after + 1):
                under_way.append(ask(step, batches))
                if len(under_way) >= _AHEAD:
                    last = finish()
        with suppress(Withdrawn):
            while under_way:
                last = finish()
    except SymbiosisError:
        with suppress(SymbiosisError):
            while under_way and under_way[0].stepped.done():
                finish()  # it was done before that happened: whoever listens is to know of it
        raise
    return last
