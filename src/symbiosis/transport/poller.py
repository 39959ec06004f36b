"""Waiting for several ports at once, or for a wake-up from another thread."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import zmq


class Wakeup:
    """An event with a file descriptor: any thread notifies, the loop waits."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)  # not earlier: another thread may be about to notify


class Poller:
    """Waits on the waitables of ports: ZeroMQ sockets and file descriptors."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, waitable: Any) -> None:
        self._poller.register(waitable, zmq.POLLIN)

    def remove(self, waitable: Any) -> None:
        self._poller.unregister(waitable)

    def wait(self, timeout_s: float) -> set[Any]:
        """The waitables that are ready. Returns at the first one, or empty at the timeout."""
        whole_ms = int(timeout_s * 1000)
        found = self._poller.poll(whole_ms)
        if not found and timeout_s > whole_ms / 1000:
            time.sleep(timeout_s - whole_ms / 1000)  # the poller counts in milliseconds
            found = self._poller.poll(0)
        return {waitable for waitable, _ in found}
