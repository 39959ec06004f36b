"""A whole fine-tuning run over a session's calls, as transformers' Trainer would do it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from symbiosis.errors import OutOfRange, TooManyRequests
from symbiosis.training.calls import Loss, Step
from symbiosis.training.examples import Example
from symbiosis.training.pack import predicted
from symbiosis.training.recipe import Recipe
from symbiosis.training.session import Session

_T = TypeVar("_T")
_AHEAD = 2  # steps under way, so that the host need not wait for this thread to wake up
_PATIENCE = 1000  # times that a tenant's other sessions may have left no room


@dataclass(frozen=True, slots=True)
class Done:
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
class _UnderWay:
    """A step that was asked for."""

    losses: list[Future[Loss]]
    stepped: Future[Step]
    saved: Future[None] | None
    learning_rate: float

    def done(self, total: int) -> Done:
        """Waits for its answers."""
        losses, step = [future.result() for future in self.losses], self.stepped.result()
        if self.saved is not None:
            self.saved.result()
        loss, tokens = sum(each.loss for each in losses), sum(each.tokens for each in losses)
        return Done(step.number, total, loss, self.learning_rate, step.gradient_norm, tokens)


class _Asked:
    """Calls without an answer yet. When a session takes no more, the oldest is waited for; with none, the tenant's others."""

    def __init__(self) -> None:
        self._open: deque[Future[Any]] = deque()

    def ask(self, call: Callable[[], Future[_T]]) -> Future[_T]:
        while self._open and self._open[0].done():
            self._open.popleft()
        patience = _PATIENCE
        while True:
            try:
                self._open.append(future := call())
            except TooManyRequests as error:
                if self._open:
                    wait([self._open.popleft()])
                elif patience > 0:
                    patience -= 1
                    time.sleep(error.retry_s)
                else:
                    raise
            else:
                return future


def _items(session: Session, batches: list[list[Example]]) -> list[int]:
    """What the losses of each batch of a step are divided by, as Trainer does it."""
    if session.takes_items:
        return [sum(example.labelled for batch in batches for example in batch)] * len(batches)
    return [len(batches) * sum(predicted(session.adapter, example) for example in batch) for batch in batches]


def run(
    session: Session,
    data: Sequence[Example],
    recipe: Recipe,
    *,
    after: int = 0,
    on_step: Callable[[Done], None] | None = None,
    checkpoint: Callable[[int], Path | None] | None = None,
    stop: threading.Event | None = None,
) -> Done | None:
    """Train until the recipe's end, or until `stop` is set; returns the last step, None if there was none.

    `checkpoint` is asked after which steps to save the session, and where. `after` steps have been done before, and
    the session was loaded from where they ended. Raises what ends the session; `OutOfRange` before the first step if
    an example cannot be trained on.
    """
    if not data:
        raise OutOfRange("there is nothing to learn from", field="data", expected="one example at least")
    session.check(data)
    total = recipe.total(len(data))
    under_way: deque[_UnderWay] = deque()
    asked = _Asked()
    last: Done | None = None
    step = after

    def finish() -> Done:
        done = under_way.popleft().done(total)
        if on_step is not None:
            on_step(done)
        return done

    for batches in recipe.batches(len(data), after=after):
        if stop is not None and stop.is_set():
            break
        chosen = [[data[number] for number in batch] for batch in batches]
        settings = recipe.settings(step, total)
        losses = [
            asked.ask(partial(session.forward_backward, batch, items=items))
            for batch, items in zip(chosen, _items(session, chosen), strict=True)
        ]
        stepped = asked.ask(partial(session.optim_step, settings))
        step += 1
        folder = checkpoint(step) if checkpoint is not None else None
        saved = asked.ask(partial(session.save, folder, optimizer=True)) if folder is not None else None
        under_way.append(_UnderWay(losses, stepped, saved, settings.learning_rate))
        if len(under_way) >= _AHEAD:
            last = finish()
    while under_way:
        last = finish()
    return last
