"""Whose turn it is on cores that the hosted engine, split tenants' training and hosted training share.

The engine computes pass after pass (`with turns:`); the executor computes
training in small pieces (`begin`, `end`); never both at once, since two that
compute on the same cores take more than twice as long. The engine has the
word: once it wants to begin it waits for what training has earned by its last
pass, at most, and after that for no more than the piece that runs.

Hosted training computes passes that cannot be cut (`begin_pass`, `end_pass`):
short ones while the engine serves, and after each it rests until it has had no
more than its share of the time. One that is long, since nobody was served when
it began, is not waited for: who comes then computes beside it. A GPU is
shared in another way (`beside`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_PIECE_S = 0.05  # where nobody is served: who comes waits for no more than that
_LEAST_S = 1e-4
_WAKE_S = 0.05  # a thread that was told of its turn has begun by then
_RISE = 1.1  # a pass longer than others (a long prompt) hardly counts, until they all are


@dataclass(frozen=True, slots=True)
class Permit:
    """That a pass of hosted training may begin."""

    kind: str
    """Passes of one kind are as fast as each other."""
    most_s: float = math.inf
    """How long it should take."""
    beside: bool = False
    """Answers are served meanwhile."""


class CpuTimeShare:
    """Used by three threads: the engine's enters and leaves, the executor's and hosted training's begin and end."""

    _idle_s = 1.0  # the engine has computed nothing for so long: it serves nobody

    def __init__(self, share: float = 0.1, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` of the time is training's while the engine serves; 1.0: neither heeds the other."""
        self._clock = clock
        self._earns = share / (1 - share) if share < 1 else math.inf
        self._changed = threading.Condition()
        self._wanted = self._passing = self._piece = self._waiting = False
        self._began = self._ended = -math.inf  # of the last pass
        self._pace_s = math.inf
        self._credit_s = 0.0
        self._training = self._asking = self._yielding = False
        self._pass_began = self._late = self._rested = -math.inf
        self._short = False
        self.on_free: Callable[[], object] = lambda: None
        """Called by the engine's thread when the executor was refused a turn and may ask again."""

    # -- the engine's -----------------------------------------------------------------------

    def __enter__(self) -> None:
        with self._changed:
            self._wanted = True
            if math.isfinite(self._earns):
                self._changed.wait_for(lambda: not (self._waiting and self._is_owed()), timeout=max(0.0, self._credit_s))
                self._yield()
                self._changed.wait_for(lambda: not self._training, timeout=max(0.0, self._late - self._clock()))
                self._changed.wait_for(lambda: not self._piece)
            self._passing, self._began = True, self._clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._ended = self._clock()
            if kind is None:
                self._pace_s = max(_LEAST_S, min(self._ended - self._began, _RISE * self._pace_s))
            self._credit_s = self._earns * self._pace_s
            self._wanted = self._passing = False
            waiting = self._waiting
            self._changed.notify_all()
        if waiting:
            self.on_free()

    def _yield(self) -> None:
        """Let hosted training begin if it is its turn."""
        if self._asking and self._clock() >= self._rested:
            self._yielding = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._training or not self._asking, timeout=_WAKE_S)
            self._yielding = False

    def _is_owed(self) -> bool:
        """Whether training may go first although the engine waits: half a turn is not worth one."""
        return 2 * self._credit_s > self._earns * self._pace_s

    # -- the executor's ---------------------------------------------------------------------

    def busy_until(self) -> float | None:
        """When the engine's pass will end, or its last one ended; None: it serves nobody."""
        if self._passing:
            return max(self._clock(), self._began + (self._pace_s if math.isfinite(self._pace_s) else 0.0))
        return self._ended if self._wanted or self._clock() - self._ended < self._idle_s else None

    def are_taken(self) -> bool:
        """Whether training has to take turns now."""
        return math.isfinite(self._earns) and self.busy_until() is not None

    def begin(self) -> float | None:
        """Seconds that a piece may take, from now to `end`; None: not now, `on_free` tells when to ask again."""
        with self._changed:
            taken = self.are_taken()
            may = not taken or (not self._passing and not self._training and (not self._wanted or self._is_owed()))
            self._piece, self._waiting = may, not may
            self._piece_began = self._clock()
            return None if not may else self._earns * self._pace_s if taken else _PIECE_S

    def end(self) -> None:
        """The piece is computed."""
        with self._changed:
            self._piece = False
            self._credit_s -= self._clock() - self._piece_began
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody waits for a turn any more."""
        with self._changed:
            self._waiting = False
            self._changed.notify_all()

    def figures(self) -> dict[str, float]:
        """What the provider may want to know of serving beside training."""
        return {}

    # -- hosted training's ------------------------------------------------------------------

    def begin_pass(self, short_s: float, is_over: Callable[[], bool]) -> Permit | None:
        """Wait for a turn, from now to `end_pass`: for `short_s` if answers are served. None: `is_over` came first."""
        with self._changed:
            self._asking = True
            while not is_over():
                now, short = self._clock(), self.are_taken()
                free = not self._piece and not self._passing and (not self._wanted or self._yielding)
                if not short or (free and now >= self._rested):
                    self._asking, self._training, self._short = False, True, short
                    self._pass_began, self._late = now, now + 2 * short_s
                    self._changed.notify_all()
                    return Permit("short", short_s, beside=True) if short else Permit("full")
                self._changed.wait(_WAKE_S)
            self._asking = False
            self._changed.notify_all()
        return None

    def end_pass(self, *, is_new: bool = False) -> None:
        """The pass is computed. `is_new`: it had to be made ready, others of its kind will be faster."""
        with self._changed:
            self._training = False
            now = self._clock()
            if self._short:
                self._rested = now + (now - self._pass_began) / self._earns
            waiting = self._waiting
            self._changed.notify_all()
        if waiting:
            self.on_free()
