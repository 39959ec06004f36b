"""A whole fine-tuning run over a session's calls, as transformers' Trainer would do it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from symbiosis.errors import OutOfRange
from symbiosis.training.calls import Loss, Step
from symbiosis.training.examples import Example
from symbiosis.training.recipe import Recipe
from symbiosis.training.session import Session

_AHEAD = 2  # steps under way, so that the host need not wait for this thread to wake up


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


def run(
    session: Session,
    data: Sequence[Example],
    recipe: Recipe,
    *,
    after: int = 0,
    on_step: Callable[[Done], None] | None = None,
    stop: threading.Event | None = None,
) -> Done | None:
    """Train until the recipe's end, or until `stop` is set; returns the last step, None if there was none.

    `after` steps have been done before, and the session was loaded from where they ended. Raises what ends the session.
    """
    if not data:
        raise OutOfRange("there is nothing to learn from", field="data", expected="one example at least")
    total = recipe.total(len(data))
    under_way: deque[tuple[list[Future[Loss]], Future[Step], float]] = deque()
    last: Done | None = None
    step = after

    def finish() -> Done:
        losses, stepped, rate = under_way.popleft()
        answers = [future.result() for future in losses]
        answer = stepped.result()
        tokens = sum(each.tokens for each in answers)
        return Done(answer.number, total, sum(each.loss for each in answers), rate, answer.gradient_norm, tokens)

    for batches in recipe.batches(len(data), after=after):
        if stop is not None and stop.is_set():
            break
        chosen = [[data[number] for number in batch] for batch in batches]
        items = sum(example.labelled for batch in chosen for example in batch)
        settings = recipe.settings(step, total)
        losses = [session.forward_backward(batch, items=items) for batch in chosen]
        under_way.append((losses, session.optim_step(settings), settings.learning_rate))
        step += 1
        if len(under_way) >= _AHEAD:
            last = finish()
            if on_step is not None:
                on_step(last)
    while under_way:
        last = finish()
        if on_step is not None:
            on_step(last)
    return last
