"""Serves operations to other processes: their messages go to handlers, events go back to the peer.

Every message is checked although the peer is a process of this server: its content comes from outside. Imports no torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Event, JobEvent
from symbiosis.transport.engine_ipc import HEARTBEAT_S, Body, EngineListener, IpcPort

_MAX_ID = 64
_HELLO = "hello"
_log = logging.getLogger("symbiosis")


class RpcHandler(Protocol):
    """Operations of a service in this process. The IPC thread calls it: every method must be quick."""

    @property
    def operations(self) -> Collection[str]:
        """Names of its operations. `hello` follows the server's own reply to it."""

    def handle(self, id: str, body: Body) -> None:
        """Start an operation. Raises what is wrong with it. `id` begins with the number of the peer and a colon."""

    def drop_peer(self, peer: str) -> None:
        """End the operations of a lost peer: those whose ids begin with `peer` and a colon."""

    def close(self) -> None:
        """End all operations, with a last event each."""


class RpcServer:
    """Owns an IPC port. Other processes connect to it."""

    def __init__(self, listener: EngineListener, is_healthy: Callable[[], bool] = lambda: True) -> None:
        """Peers learn with each heartbeat whether this process `is_healthy`."""
        self._port = IpcPort(listener)
        self._is_healthy = is_healthy
        self._outbox: deque[Sequence[Event | JobEvent]] = deque()
        self._handlers: list[RpcHandler] = []
        self._peers: dict[str, bytes] = {}  # keys by number, the prefix of their ids
        self._numbers: dict[bytes, str] = {}
        self._unreachable: deque[bytes] = deque()
        self._dropped: set[bytes] = set()
        self._counter = itertools.count(1)
        self._stopping = False
        self.num_joined = 0
        """Peers that have connected so far."""
        self._thread = threading.Thread(target=self._run, name="symbiosis-ipc", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add_handler(self, handler: RpcHandler) -> None:
        """Must precede the first of its operations."""
        self._handlers.append(handler)

    def key_of(self, id: str) -> bytes:
        """The key of the peer of this id. For handlers, on the IPC thread."""
        return self._peers[id.partition(":")[0]]

    def publish(self, events: Sequence[Event | JobEvent]) -> None:
        """Send events to their peers. Thread-safe."""
        self._outbox.append(events)
        self._port.wake()

    def drop(self, keys: Sequence[bytes]) -> None:
        """These peers cannot be reached. Thread-safe."""
        self._unreachable += keys
        self._port.wake()

    def close(self) -> None:
        """End all operations, those of the last handler first; peers receive their last events."""
        for handler in reversed(self._handlers):
            handler.close()
        self._stopping = True
        self._port.wake()
        self._thread.join(timeout=30)

    # On the IPC thread

    def _run(self) -> None:
        last_beat_s = 0.0
        try:
            while not self._stopping:
                for key, body in self._port.receive(HEARTBEAT_S):
                    self._receive(key, body)
                self._send_events()
                if time.monotonic() - last_beat_s >= HEARTBEAT_S:
                    last_beat_s = time.monotonic()
                    for number in list(self._peers):
                        self._send(number, {"beat": self._is_healthy()})
            self._send_events()
        except BaseException:
            _log.exception("the IPC server failed")
            raise
        finally:
            self._port.close()

    def _send_events(self) -> None:
        by_peer: dict[str, list[Any]] = {}
        while self._unreachable:
            if (number := self._numbers.get(self._unreachable.popleft())) is not None:
                self._drop(number)
        while self._outbox:
            for event in self._outbox.popleft():
                number, _, id = event.id.partition(":")
                if number in self._peers:
                    by_peer.setdefault(number, []).append(messages.encode_event(event, id))
        for number, events in by_peer.items():
            self._send(number, {"events": events})

    def _send(self, number: str, body: Body) -> None:
        if number in self._peers and not self._port.send(self._peers[number], body):
            self._drop(number)

    def _drop(self, number: str) -> None:
        """The peer is lost."""
        for handler in self._handlers:
            handler.drop_peer(number)
        key = self._peers.pop(number)
        del self._numbers[key]
        self._dropped.add(key)

    def _receive(self, key: bytes, body: Body | BadMessage) -> None:
        if key in self._dropped:  # it was too slow, not gone: it has lost events and must start again
            self._port.send(key, {"beat": False})
            return
        if key not in self._numbers:
            self._numbers[key] = str(next(self._counter))
            self._peers[self._numbers[key]] = key
            self.num_joined += 1
        number = self._numbers[key]
        if isinstance(body, BadMessage):
            _log.warning("a message could not be decoded: %s", body)
            return
        id = body.get("id")
        if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID:
            _log.warning("a message has no id: expected a text of 1 to %d characters", _MAX_ID)
            return
        try:
            self._handle(number, f"{number}:{id}", body)
        except SymbiosisError as error:
            self._send(number, {"events": [messages.encode_event(messages.Rejected("", error), id)]})

    def _handle(self, number: str, full_id: str, body: Body) -> None:
        """`full_id` is unique over all peers."""
        op = body.get("op")
        if op == _HELLO:
            self._send(number, {"beat": self._is_healthy(), "peer": int(number)})
            if number not in self._peers:  # it has gone already
                return
        handler = next((each for each in self._handlers if isinstance(op, str) and op in each.operations), None)
        if handler is not None:
            handler.handle(full_id, body)
        elif op != _HELLO:
            raise BadMessage(f"op is {op!r:.40}: expected {_HELLO} or {', '.join(sorted(self._operations()))}")

    def _operations(self) -> set[str]:
        return {name for handler in self._handlers for name in handler.operations} - {_HELLO}
