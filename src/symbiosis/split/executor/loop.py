"""The executor's one thread: take what arrived, run what is due, sleep until something is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from symbiosis.common import denormals
from symbiosis.errors import Closed, SymbiosisError
from symbiosis.split.executor.service import Service
from symbiosis.transport.base import Peer, Port
from symbiosis.transport.messages import Message
from symbiosis.transport.poller import Poller, Wakeup

_DRAIN_AT_ONCE = 64
_TIDY_EVERY_S = 10.0
# Polled ports: no sleep for a moment after a batch (the next call of a tenant's pass is on its way, and its GPU waits),
# then naps, then longer ones.
_SPIN_S, _NAP_S, _DOZE_S, _DOZE_AFTER_S = 0.02, 1e-4, 1e-3, 2.0
_LOOK_EVERY_S = 5e-4  # while that lasts, the other ports are looked at so often
_log = logging.getLogger("symbiosis")


class ExecutorLoop:
    """Owns the ports. Everything they bring is handled on one thread, so nothing needs a lock.

    However the loop ends, its ports are closed: nobody waits for an answer
    that will not come.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ports: list[Port] = []
        self._waiter = Poller()
        self._wakeup = Wakeup()
        self._waiter.add(self._wakeup.fileno())
        service.turns.on_slice_available = self._wakeup.ring
        self._new: list[tuple[Port, Future[None]]] = []
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, port: Port) -> None:
        """Serve one more port; returns when the loop has it. Raises `Closed` (and closes the port) if it has ended."""
        taken: Future[None] = Future()
        self._new.append((port, taken))
        self._wakeup.ring()
        if self._ended:  # perhaps after it looked for the last time
            self._turn_away()
        taken.result()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.ring()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        denormals.count_as_zero()
        try:
            self._serve()
        except BaseException:
            _log.exception("the executor's loop failed")
            raise
        finally:
            self._ended = True
            self._service.turns.cancel_slice()
            for port in self._ports:
                _close(port)
            self._turn_away()

    def _serve(self) -> None:
        tidied = looked = time.monotonic()
        timeout: float | None = None
        polled: list[Port] = []
        while not self._stopping:
            now = time.monotonic()
            if not polled or now - looked > _LOOK_EVERY_S or now - self._service.last_batch > _SPIN_S:
                self._look(self._patience(timeout, now) if polled else _TIDY_EVERY_S if timeout is None else timeout)
                looked = now = time.monotonic()
            polled = [port for port in self._ports if port.is_polled()]
            for port in polled:
                self._take(port, port.poll())
            timeout = self._service.step()
            if now - tidied > _TIDY_EVERY_S:
                self._tidy()
                tidied = now

    def _look(self, patience: float) -> None:
        """Wait for what the ports' waitables tell of, and handle it."""
        ready = self._waiter.wait(patience)
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
            self._welcome_ports()
        for port in [port for port in self._ports if port.waitable() in ready]:
            self._take(port, port.drain(_DRAIN_AT_ONCE))

    def _tidy(self) -> None:
        try:
            self._service.tidy()
        except Exception:  # noqa: BLE001 - whoever is left is served all the same
            _log.exception("a channel that is gone could not be let go")

    def _patience(self, timeout: float | None, now: float) -> float:
        """How long to sleep at most while there are tenants that do not ring: hardly at all while one is busy."""
        quiet = now - self._service.last_batch
        nap = 0.0 if quiet < _SPIN_S else _NAP_S if quiet < _DOZE_AFTER_S else _DOZE_S
        return nap if timeout is None else min(nap, timeout)

    def _welcome_ports(self) -> None:
        while self._new:
            port, taken = self._new.pop(0)
            self._ports.append(port)
            self._waiter.add(port.waitable())
            taken.set_result(None)

    def _take(self, port: Port, arrived: Iterable[tuple[Peer, Message | SymbiosisError]]) -> None:
        """Handle what has arrived at a port, as far as there is room for it."""
        if self._service.is_full():
            return
        try:
            for peer, message in arrived:
                self._service.handle(peer, message)
                if self._service.is_full():
                    return
        except Exception:  # noqa: BLE001 - one port's end is not the others'
            _log.exception("%s cannot be read any more: closed", port.address)
            self._ports.remove(port)
            self._waiter.remove(port.waitable())
            _close(port)

    def _turn_away(self) -> None:
        while True:
            try:
                port, taken = self._new.pop(0)
            except IndexError:  # `add` and the loop's end may both be at it
                return
            _close(port)
            taken.set_exception(Closed("the executor was closed"))


def _close(port: Port) -> None:
    try:
        port.close()
    except Exception:  # noqa: BLE001 - the other ports are to be closed too
        _log.exception("%s could not be closed", port.address)
