"""Time slices on CPU cores that the hosted engine, the executor's training batches and hosted fine-tuning share.

Computing concurrently on the same cores takes more than twice as long, so one of the three runs at a time. The engine
runs steps (`with share:`). The executor runs training batches in slices (`begin_slice`, `end_slice`). The engine has
priority: before a step it waits for the slice that runs, and for the credit that training has earned by the last step.

Fine-tuning runs passes that cannot be sliced (`begin_pass`, `end_pass`). While the engine serves, passes are short, and
after each one fine-tuning pauses until its share of the time is not exceeded. The engine does not wait for a long pass
that began while it was idle: both then run concurrently. `gpu_partition` shares a GPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_IDLE_SLICE_S = 0.05  # while the engine is idle: bounds the delay of its next step
_MIN_STEP_S = 1e-4
_WAKE_S = 0.05  # bounds the time that a notified thread takes to start
_MAX_STEP_GROWTH = 1.1  # per step: one long prefill hardly changes the estimate


@dataclass(frozen=True, slots=True)
class PassBudget:
    """Permission to run one pass of hosted fine-tuning, and its time budget."""

    kind: str
    """Passes of one kind have the same speed."""
    max_s: float = math.inf
    """Target duration."""
    is_serving: bool = False
    """The engine serves requests during the pass."""


class CpuTimeShare:
    """Thread-safe. The engine enters and leaves; the executor and hosted fine-tuning begin and end, each on its thread."""

    _idle_after_s = 1.0  # the engine counts as idle this long after its last step

    def __init__(self, share: float = 0.1, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is training's part of the time while the engine serves; 1.0 turns time slicing off."""
        self._clock = clock
        self._credit_rate = share / (1 - share) if share < 1 else math.inf  # training seconds per second of the engine
        self._changed = threading.Condition()
        self._engine_waiting = self._engine_running = self._slice_running = self._slice_waiting = False
        self._step_started = self._step_ended = -math.inf
        self._step_s = math.inf
        self._credit_s = 0.0
        self._pass_running = self._pass_waiting = self._engine_yields = self._pass_is_short = False
        self._pass_started = self._pass_deadline = self._next_pass_at = -math.inf
        self.on_slice_available: Callable[[], object] = lambda: None
        """Called by other threads after `begin_slice` returned None: a new attempt may succeed."""

    # -- engine -----------------------------------------------------------------------------

    def __enter__(self) -> None:
        with self._changed:
            self._engine_waiting = True
            if math.isfinite(self._credit_rate):
                self._changed.wait_for(lambda: not (self._slice_waiting and self._has_credit()), max(0.0, self._credit_s))
                self._yield_to_pass()
                self._changed.wait_for(lambda: not self._pass_running, max(0.0, self._pass_deadline - self._clock()))
                self._changed.wait_for(lambda: not self._slice_running)
            self._engine_running, self._step_started = True, self._clock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._step_ended = self._clock()
            if kind is None:
                self._step_s = max(_MIN_STEP_S, min(self._step_ended - self._step_started, _MAX_STEP_GROWTH * self._step_s))
            self._credit_s = self._credit_rate * self._step_s
            self._engine_waiting = self._engine_running = False
            self._changed.notify_all()
        if self._slice_waiting:
            self.on_slice_available()

    def _yield_to_pass(self) -> None:
        """Let a waiting pass begin if its pause is over."""
        if self._pass_waiting and self._clock() >= self._next_pass_at:
            self._engine_yields = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pass_running or not self._pass_waiting, _WAKE_S)
            self._engine_yields = False

    def _has_credit(self) -> bool:
        """Whether a slice may run before a waiting step: at least half of the earned time is left."""
        return 2 * self._credit_s > self._credit_rate * self._step_s

    # -- executor ---------------------------------------------------------------------------

    def busy_until(self) -> float | None:
        """Expected end of the engine's step, or the end of the last one; None while the engine is idle."""
        if self._engine_running:
            return max(self._clock(), self._step_started + (self._step_s if math.isfinite(self._step_s) else 0.0))
        is_busy = self._engine_waiting or self._clock() - self._step_ended < self._idle_after_s
        return self._step_ended if is_busy else None

    def is_contended(self) -> bool:
        """Whether training runs in time slices now."""
        return math.isfinite(self._credit_rate) and self.busy_until() is not None

    def begin_slice(self) -> float | None:
        """Seconds that a slice may take until `end_slice`; None if none may run now: `on_slice_available` follows."""
        with self._changed:
            contended = self.is_contended()
            is_free = not self._engine_running and not self._pass_running
            allowed = not contended or (is_free and (not self._engine_waiting or self._has_credit()))
            self._slice_running, self._slice_waiting = allowed, not allowed
            self._slice_started = self._clock()
            return None if not allowed else self._credit_rate * self._step_s if contended else _IDLE_SLICE_S

    def end_slice(self) -> None:
        with self._changed:
            self._slice_running = False
            self._credit_s -= self._clock() - self._slice_started
            self._changed.notify_all()

    def cancel_slice(self) -> None:
        """The engine stops waiting for a slice that was not allowed before."""
        with self._changed:
            self._slice_waiting = False
            self._changed.notify_all()

    def stats(self) -> dict[str, float]:
        """Statistics of serving concurrent with training."""
        return {}

    # -- hosted fine-tuning -----------------------------------------------------------------

    def begin_pass(self, short_s: float, is_cancelled: Callable[[], bool]) -> PassBudget | None:
        """Wait until a pass may run; it ends with `end_pass`. Its budget is `short_s` while the engine serves.

        Returns None once `is_cancelled` returns True.
        """
        with self._changed:
            self._pass_waiting = True
            while not is_cancelled():
                now, short = self._clock(), self.is_contended()
                is_busy = self._slice_running or self._engine_running or (self._engine_waiting and not self._engine_yields)
                if not short or (not is_busy and now >= self._next_pass_at):
                    self._pass_waiting, self._pass_running, self._pass_is_short = False, True, short
                    self._pass_started, self._pass_deadline = now, now + 2 * short_s
                    self._changed.notify_all()
                    return PassBudget("short", short_s, is_serving=True) if short else PassBudget("full")
                self._changed.wait(_WAKE_S)
            self._pass_waiting = False
            self._changed.notify_all()
        return None

    def end_pass(self, *, is_new: bool = False) -> None:
        """The pass has ended. `is_new`: it was prepared (compiled, captured); later ones of its kind are faster."""
        with self._changed:
            self._pass_running = False
            now = self._clock()
            if self._pass_is_short:
                self._next_pass_at = now + (now - self._pass_started) / self._credit_rate
            self._changed.notify_all()
        if self._slice_waiting:
            self.on_slice_available()
