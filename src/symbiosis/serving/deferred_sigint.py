"""Ctrl-C that waits: what it would leave half done is done first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class DeferredSigint:
    """A context manager. Within, SIGINT is kept until `take`; at the end it is let through.

    Only the main thread is interrupted, and only if somebody handles the signal: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        self._came: tuple[int, FrameType | None] | None = None
        self._keeps = threading.current_thread() is threading.main_thread() and callable(self._handler)

    def __enter__(self) -> Self:
        if self._keeps:
            signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeps:
            signal.signal(signal.SIGINT, self._handler)
        self.take()

    def take(self) -> None:
        """What came is handled now; by default, it raises `KeyboardInterrupt`."""
        came, self._came = self._came, None
        if came is not None and callable(self._handler):
            self._handler(*came)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
