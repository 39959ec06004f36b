"""Defers Ctrl-C while an operation must not be interrupted."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class DeferredSigint:
    """A context manager: SIGINT is held until `deliver` or the exit.

    Has an effect only on the main thread, which alone is interrupted, and only if SIGINT has a Python handler.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        self._pending: tuple[int, FrameType | None] | None = None
        self._is_active = threading.current_thread() is threading.main_thread() and callable(self._handler)

    def __enter__(self) -> Self:
        if self._is_active:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def deliver(self) -> None:
        """Handle a held signal now; the default handler raises `KeyboardInterrupt`."""
        pending, self._pending = self._pending, None
        if pending is not None and callable(self._handler):
            self._handler(*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)
