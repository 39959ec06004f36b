"""The executor's thread: handles messages that have arrived, runs batches that are due, sleeps until the next."""

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

_MAX_DRAINED = 64
_TIDY_EVERY_S = 10.0
# Polled ports: the loop spins after a batch (the next call of a forward pass follows, and the tenant's GPU waits for it),
# then sleeps briefly, then longer.
_SPIN_S, _SHORT_SLEEP_S, _LONG_SLEEP_S, _LONG_SLEEP_AFTER_S = 0.02, 1e-4, 1e-3, 2.0
_WAIT_EVERY_S = 5e-4  # interval at which a spinning loop checks the ports that are not polled
_log = logging.getLogger("symbiosis")


class ExecutorLoop:
    """Owns the ports, and handles all their messages on one thread, without locks.

    The ports are closed however the loop ends, so that no client waits for a reply in vain.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._batcher = service, service.batcher
        self._ports: list[Port] = []
        self._poller, self._wakeup = Poller(), Wakeup()
        self._poller.add(self._wakeup.fileno())
        service.device_share.on_slice_available = service.on_collected = self._wakeup.notify
        self._added: list[tuple[Port, Future[None]]] = []
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, port: Port) -> None:
        """Serve one more port; returns once the loop serves it. Raises `Closed` (and closes the port) if the loop has ended."""
        accepted: Future[None] = Future()
        self._added.append((port, accepted))
        self._wakeup.notify()
        if self._ended:  # the loop may have missed it
            self._reject_added()
        accepted.result()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop, from any thread, without waiting for it."""
        self._stopping = True
        self._wakeup.notify()

    def stop(self) -> None:
        self.end()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        denormals.flush_to_zero()
        try:
            self._serve()
        except BaseException:
            _log.exception("the executor's loop failed")
            raise
        finally:
            self._ended = True
            self._service.device_share.cancel_slice()
            for port in self._ports:
                _close(port)
            self._reject_added()

    def _serve(self) -> None:
        tidied = waited = time.monotonic()
        timeout_s: float | None = None
        polled: list[Port] = []
        while not self._stopping:
            now = time.monotonic()
            if not polled or now - waited > _WAIT_EVERY_S or now - self._batcher.last_batch > _SPIN_S:
                self._wait(self._sleep_s(timeout_s, now) if polled else _TIDY_EVERY_S if timeout_s is None else timeout_s)
                waited = now = time.monotonic()
            polled = [port for port in self._ports if port.needs_polling()]
            for port in polled:
                self._handle_all(port, port.poll())
            timeout_s = self._batcher.step()
            if now - tidied > _TIDY_EVERY_S:
                tidied = now
                try:
                    self._service.tidy()
                except Exception:  # noqa: BLE001 - the other sessions are served
                    _log.exception("a lost session could not be closed")

    def _wait(self, timeout_s: float) -> None:
        """Wait until a port is readable, and handle its messages."""
        ready = self._poller.wait(timeout_s)
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
            self._accept_added()
            self._service.send_collected()
        for port in [port for port in self._ports if port.waitable() in ready]:
            self._handle_all(port, port.drain(_MAX_DRAINED))

    def _sleep_s(self, timeout_s: float | None, now: float) -> float:
        """Longest sleep while there are polled ports: the longer the executor is idle, the longer."""
        idle_s = now - self._batcher.last_batch
        sleep_s = 0.0 if idle_s < _SPIN_S else _SHORT_SLEEP_S if idle_s < _LONG_SLEEP_AFTER_S else _LONG_SLEEP_S
        return sleep_s if timeout_s is None else min(sleep_s, timeout_s)

    def _accept_added(self) -> None:
        while self._added:
            port, accepted = self._added.pop(0)
            self._ports.append(port)
            self._poller.add(port.waitable())
            accepted.set_result(None)

    def _handle_all(self, port: Port, arrived: Iterable[tuple[Peer, Message | SymbiosisError]]) -> None:
        """Handle the messages of a port until the queue is full."""
        if self._batcher.is_full():
            return
        try:
            for peer, message in arrived:
                self._service.handle(peer, message)
                if self._batcher.is_full():
                    return
        except Exception:  # noqa: BLE001 - the other ports stay open
            _log.exception("%s cannot be read: closed", port.address)
            self._ports.remove(port)
            self._poller.remove(port.waitable())
            _close(port)

    def _reject_added(self) -> None:
        while True:
            try:
                port, accepted = self._added.pop(0)
            except IndexError:  # `add` and the loop may both empty the list
                return
            _close(port)
            accepted.set_exception(Closed("the executor was closed"))


def _close(port: Port) -> None:
    try:
        port.close()
    except Exception:  # noqa: BLE001 - the other ports must be closed too
        _log.exception("%s could not be closed", port.address)
