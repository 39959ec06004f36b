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
from pathlib import Path
from typing import Any, Protocol

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Event, JobEvent, Token, int_field, text_field
from symbiosis.transport.engine_ipc import HEARTBEAT_S, Body, IpcPort

_MAX_ID = 64
_MAX_NUMBER = (1 << 31) - 1
_MAX_PATH = 4096
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Peer:
    key: bytes
    requests: dict[str, int] = field(default_factory=dict)
    """Number of unfinished completions of each request."""
    tokens: list[int] = field(default_factory=list)
    """Of the next message: see `engine_messages`."""


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
    """Owns an engine loop and an IPC port. Other processes connect to `path`."""

    def __init__(self, core: EngineCore, folder: Path) -> None:
        self._port = IpcPort(folder)
        self.path = self._port.path
        self._outbox: deque[Sequence[Event | JobEvent]] = deque()
        self._handlers: list[RpcHandler] = []
        self._peers: dict[str, _Peer] = {}  # by number, the prefix of their ids
        self._numbers: dict[bytes, str] = {}  # of the peers
        self._routes: dict[str, tuple[_Peer, int]] = {}  # peer and its own id, by id of a request
        self._counter = itertools.count(1)
        self._stopping = False
        self.engine_loop = EngineLoop(core, self.publish)
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

    def close(self) -> None:
        """End all operations; peers receive their last events."""
        for handler in self._handlers:
            handler.close()
        self.engine_loop.close()
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
                        self._send(number, {"beat": self.engine_loop.is_alive()})
            self._send_events()
        except BaseException:
            _log.exception("the engine's IPC server failed")
            raise
        finally:
            self._port.close()

    def _send_events(self) -> None:
        by_peer: dict[str, list[Any]] = {}
        routes = self._routes
        while self._outbox:
            for event in self._outbox.popleft():
                if type(event) is Token and event.logprobs is None:
                    if (route := routes.get(event.id)) is not None:
                        route[0].tokens += (route[1], event.number, event.token)
                    continue
                number, _, id = event.id.partition(":")
                peer = self._peers.get(number)
                if peer is None:
                    continue
                by_peer.setdefault(number, []).append(messages.encode_event(event, id))
                if isinstance(event, messages.Finished | messages.Rejected) and id in peer.requests:
                    peer.requests[id] -= 1
                    if isinstance(event, messages.Rejected) or not peer.requests[id]:
                        del peer.requests[id], routes[event.id]
        for number, peer in list(self._peers.items()):
            if peer.tokens or number in by_peer:
                tokens, peer.tokens = peer.tokens, []
                events = {"events": by_peer[number]} if number in by_peer else {}
                self._send(number, events, messages.encode_tokens(tokens))

    def _send(self, number: str, body: Body, tokens: bytes = b"") -> None:
        peer = self._peers[number]
        if not self._port.send(peer.key, body, tokens):
            del self._peers[number], self._numbers[peer.key]
            if peer.requests:
                _log.warning("a peer is lost: its %d requests are cancelled", len(peer.requests))
            for id in peer.requests:
                del self._routes[f"{number}:{id}"]
                self.engine_loop.cancel(f"{number}:{id}")
            for handler in self._handlers:
                handler.drop_peer(number)

    def _receive(self, key: bytes, body: Body | BadMessage) -> None:
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
            if not id.isdecimal() or int(id) > _MAX_NUMBER:
                raise BadMessage(f"request {id!r} cannot be routed: expected a decimal number up to {_MAX_NUMBER} as its id")
            request = messages.decode_request(full_id, body)
            peer.requests[id], self._routes[full_id] = request.n, (peer, int(id))
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
            self._send(full_id.partition(":")[0], {"beat": loop.is_alive()})
        else:
            handler = next((each for each in self._handlers if isinstance(op, str) and op in each.operations), None)
            if handler is None:
                raise BadMessage(f"op is {op!r:.40}: expected hello, submit, cancel, load, unload, pin or stats")
            handler.handle(full_id, body)
