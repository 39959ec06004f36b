"""Serves the engine loop to other processes: IPC messages become operations, events go back to the peer.

A lost peer's requests are cancelled. Every message is checked although the peer is a process of this server: its content
comes from outside.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Event, JobEvent, int_field, text_field
from symbiosis.transport.engine_ipc import HEARTBEAT_S, Body, EngineListener, IpcPort, TokenPort

_MAX_ID = 64
_MAX_PATH = 4096
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Peer:
    key: bytes
    requests: dict[str, int] = field(default_factory=dict)
    """Number of unfinished completions of each request."""


class RpcHandler(Protocol):
    """Operations of another service in this process. The IPC thread calls it: every method must be quick."""

    @property
    def operations(self) -> Collection[str]:
        """Names of its operations."""

    def handle(self, id: str, body: Body) -> None:
        """Start an operation. Raises what is wrong with it."""

    def drop_peer(self, peer: str) -> None:
        """End the operations of a lost peer: those whose ids begin with `peer` and a colon."""

    def close(self) -> None:
        """End all operations, with a last event each."""


class IpcServer:
    """Owns an engine loop and an IPC port. Other processes connect to `address`."""

    def __init__(self, core: EngineCore, listener: EngineListener) -> None:
        self._port = IpcPort(listener)
        self._outbox: deque[Sequence[Event | JobEvent]] = deque()
        self._handlers: list[RpcHandler] = []
        self._peers: dict[str, _Peer] = {}  # by number, the prefix of their ids
        self._numbers: dict[bytes, str] = {}  # of the peers
        self._dropped: set[bytes] = set()
        self._counter = itertools.count(1)
        self._stopping = False
        self._token_port, self._unreachable = TokenPort(listener), deque[bytes]()
        self.address = listener.address
        self.engine_loop = EngineLoop(core, self.publish, self._publish_tokens)
        self.num_joined = 0
        """Peers that have connected so far."""
        self._thread = threading.Thread(target=self._run, name="symbiosis-ipc", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.engine_loop.is_alive()

    def add_handler(self, handler: RpcHandler) -> None:
        """Must precede the first of its operations."""
        self._handlers.append(handler)

    def publish(self, events: Sequence[Event | JobEvent]) -> None:
        """Send events to their peers. Thread-safe."""
        self._outbox.append(events)
        self._port.wake()

    def _publish_tokens(self, values: list[int]) -> None:
        """On the stepping thread."""
        if lost := self._token_port.send(messages.encode_tokens(values)):
            self._unreachable += lost
            self._port.wake()

    def close(self) -> None:
        """End all operations; peers receive their last events."""
        for handler in self._handlers:
            handler.close()
        self.engine_loop.close()
        self._stopping = True
        self._port.wake()
        self._thread.join(timeout=30)
        self._token_port.close()

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
                        self._send(number, {"beat": self.engine_loop.is_alive()})
            self._send_events()
        except BaseException:
            _log.exception("the engine's IPC server failed")
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
                peer = self._peers.get(number)
                if peer is None:
                    continue
                by_peer.setdefault(number, []).append(messages.encode_event(event, id))
                if isinstance(event, messages.Finished | messages.Rejected) and id in peer.requests:
                    peer.requests[id] -= 1
                    if isinstance(event, messages.Rejected) or not peer.requests[id]:
                        del peer.requests[id]
        for number, events in by_peer.items():
            self._send(number, {"events": events})

    def _send(self, number: str, body: Body) -> None:
        if not self._port.send(self._peers[number].key, body):
            self._drop(number)

    def _drop(self, number: str) -> None:
        """The peer is lost."""
        peer = self._peers.pop(number)
        del self._numbers[peer.key]
        self._dropped.add(peer.key)
        self._token_port.remove(peer.key)
        if peer.requests:
            _log.warning("a peer is lost: its %d requests are cancelled", len(peer.requests))
        for id in peer.requests:
            self.engine_loop.cancel(f"{number}:{id}")
        for handler in self._handlers:
            handler.drop_peer(number)

    def _receive(self, key: bytes, body: Body | BadMessage) -> None:
        if key in self._dropped:  # it was too slow, not gone: it has lost events and must start again
            self._port.send(key, {"beat": False})
            return
        if key not in self._numbers:
            self._numbers[key] = str(next(self._counter))
            self._peers[self._numbers[key]] = _Peer(key)
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
            self._handle(self._peers[number], id, f"{number}:{id}", body)
        except SymbiosisError as error:
            self._send(number, {"events": [messages.encode_event(messages.Rejected("", error), id)]})

    def _handle(self, peer: _Peer, id: str, full_id: str, body: Body) -> None:
        """`full_id` is unique over all peers."""
        op, loop = body.get("op"), self.engine_loop
        if op == "submit":
            if id in peer.requests:
                raise BadMessage(f"request {id!r} exists already: expected a new id")
            if not id.isdecimal() or int(id) > messages.MAX_ID:
                raise BadMessage(f"the id of request {id!r}: expected a decimal number up to {messages.MAX_ID}")
            stream = messages.stream_number(int(full_id.partition(":")[0]), int(id))
            request = messages.decode_request(full_id, body, stream)
            peer.requests[id] = request.num_unfinished
            self._token_port.add(peer.key)
            loop.submit(request)
        elif op == "cancel":
            completion = body.get("number")
            loop.cancel(full_id, None if completion is None else int_field(completion, "number"))
        elif op == "load":
            folder = text_field(body, "folder", _MAX_PATH)
            loop.load(full_id, text_field(body, "name"), folder, replace=body.get("replace") is True)
        elif op == "unload":
            loop.unload(full_id, text_field(body, "name"))
        elif op == "pin":
            loop.pin(full_id, text_field(body, "name"), body.get("pinned") is True)
        elif op == "stats":
            loop.stats(full_id)
        elif op == "hello":
            number = full_id.partition(":")[0]
            loop.call(partial(self._token_port.greet, peer.key))
            self._send(number, {"beat": loop.is_alive(), "peer": int(number)})
        else:
            handler = next((each for each in self._handlers if isinstance(op, str) and op in each.operations), None)
            if handler is None:
                raise BadMessage(f"op is {op!r:.40}: expected hello, submit, cancel, load, unload, pin or stats")
            handler.handle(full_id, body)
