"""The executor's one thread: take what arrived, run what is due, sleep until something is."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from symbiosis.executor.service import Service
from symbiosis.links.base import Port
from symbiosis.links.waiting import Waiter, Wakeup

_DRAIN_AT_ONCE = 256
_TIDY_EVERY_S = 10.0


class Loop:
    """Owns the ports. Everything they bring is handled on one thread, so nothing needs a lock."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ports: list[Port] = []
        self._waiter = Waiter()
        self._wakeup = Wakeup()
        self._waiter.add(self._wakeup)
        self._new: list[tuple[Port, Future[None]]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, port: Port) -> None:
        """Serve one more port; returns when the loop has it."""
        taken: Future[None] = Future()
        self._new.append((port, taken))
        self._wakeup.ring()
        taken.result(timeout=60)

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.ring()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        tidied = time.monotonic()
        timeout: float | None = None
        while not self._stopping:
            if timeout is None or timeout > 0:
                self._waiter.wait(_TIDY_EVERY_S if timeout is None else timeout)
            self._wakeup.clear()
            while self._new:
                port, taken = self._new.pop(0)
                self._ports.append(port)
                self._waiter.add(port.waitable())
                taken.set_result(None)
            for port in self._ports:
                for peer, message in port.drain(_DRAIN_AT_ONCE):
                    self._service.handle(peer, message)
            timeout = self._service.step()
            if time.monotonic() - tidied > _TIDY_EVERY_S:
                self._service.tidy()
                tidied = time.monotonic()
        for port in self._ports:
            port.close()
