"""The desk's window to other processes: what the line brings becomes orders, what the desk says goes back to who asked.

A peer that is gone takes its orders with it. Everything a peer says is checked
here, although it is a process of our own: its input came from outside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.serving.engine import EngineCore
from symbiosis.serving.engine_loop import Accepted, EngineLoop, Event, Finished, GenerateRequest, Rejected, Token
from symbiosis.serving.scheduling.sequence import Sampling, within
from symbiosis.transport.engine_ipc import BEAT_S, Body, IpcPort

_SAMPLING = {each.name for each in fields(Sampling)}
_MAX_ID = 64
_MAX_NAME = 256
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Peer:
    key: bytes
    number: int
    orders: dict[str, int] = field(default_factory=dict)
    """Answers of each order that have not ended."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """What another room says."""

    id: str
    """The ticket it was asked with."""
    body: Body


class RpcHandler(Protocol):
    """What else this process does for those who ask, besides serving. Called by the window's thread: quick."""

    @property
    def operations(self) -> Collection[str]:
        """What it takes."""

    def do(self, ticket: str, body: Body) -> None:
        """Raises what is wrong with it."""

    def leave(self, peer: str) -> None:
        """Who asked is gone: tickets that begin with this and a colon are nobody's any more."""

    def close(self) -> None:
        """End everything, and say so."""


class IpcServer:
    """Owns a desk and a line's end. `path` is what the other process connects to."""

    def __init__(self, core: EngineCore, folder: Path) -> None:
        self._port = IpcPort(folder)
        self.path = self._port.path
        self._said: deque[Sequence[Event | JobEvent]] = deque()
        self._rooms: list[RpcHandler] = []
        self._peers: dict[bytes, _Peer] = {}
        self._numbers = 0
        self._stopping = False
        self.desk = EngineLoop(core, self._post)
        self.joined = threading.Event()
        """Set when the first peer has come."""
        self._thread = threading.Thread(target=self._run, name="symbiosis-window", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.desk.is_alive()

    def add(self, room: RpcHandler) -> None:
        """Before anybody asks for it."""
        self._rooms.append(room)

    def say(self, news: Event | JobEvent) -> None:
        """Any thread may."""
        self._said.append([news])
        self._port.ring()

    def close(self) -> None:
        """End everything; peers hear of it."""
        for room in self._rooms:
            room.close()
        self.desk.close()
        self._stopping = True
        self._port.ring()
        self._thread.join(timeout=30)

    def _post(self, events: list[Event]) -> None:
        """On the desk's thread."""
        self._said.append(events)
        self._port.ring()

    def _run(self) -> None:
        beaten = 0.0
        try:
            while not self._stopping:
                for key, body in self._port.wait(BEAT_S):
                    self._hear(key, body)
                self._say()
                if time.monotonic() - beaten >= BEAT_S:
                    beaten = time.monotonic()
                    for peer in list(self._peers.values()):
                        self._send(peer, {"beat": self.desk.is_alive()})
            self._say()
        except BaseException:
            _log.exception("the engine's window failed")
            raise
        finally:
            self._port.close()

    def _say(self) -> None:
        by_peer: dict[int, list[Any]] = {}
        while self._said:
            for event in self._said.popleft():
                number, _, id = event.id.partition(":")
                by_peer.setdefault(int(number), []).append(_written(event, id))
                self._note(int(number), event, id)
        for peer in [peer for peer in self._peers.values() if peer.number in by_peer]:
            self._send(peer, {"events": by_peer[peer.number]})

    def _note(self, number: int, event: Event | JobEvent, id: str) -> None:
        if isinstance(event, Finished | Rejected):
            for peer in self._peers.values():
                if peer.number == number and id in peer.orders:
                    peer.orders[id] -= 1 if isinstance(event, Finished) else peer.orders[id]
                    if not peer.orders[id]:
                        del peer.orders[id]

    def _send(self, peer: _Peer, body: Body) -> None:
        if not self._port.send(peer.key, body):
            self._peers.pop(peer.key, None)
            if peer.orders:
                _log.warning("a process that asked is gone: its %d requests are cancelled", len(peer.orders))
            for id in peer.orders:
                self.desk.cancel(f"{peer.number}:{id}")
            for room in self._rooms:
                room.leave(str(peer.number))

    def _hear(self, key: bytes, body: Body | BadMessage) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._numbers += 1
            peer = self._peers[key] = _Peer(key, self._numbers)
            self.joined.set()
        if isinstance(body, BadMessage):
            _log.warning("a message that cannot be read: %s", body)
            return
        id = body.get("id")
        if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID:
            _log.warning("a message without an id")
            return
        try:
            self._do(peer, id, f"{peer.number}:{id}", body)
        except SymbiosisError as error:
            self._send(peer, {"events": [_written(Rejected("", error), id)]})

    def _do(self, peer: _Peer, id: str, ticket: str, body: Body) -> None:
        op = body.get("op")
        if op == "submit":
            if id in peer.orders:
                raise BadMessage(f"there is an order {id!r} already")
            order = _order(ticket, body)
            peer.orders[id] = order.n
            self.desk.submit(order)
        elif op == "cancel":
            number = body.get("number")
            self.desk.cancel(ticket, None if number is None else whole(number, "number"))
        elif op == "load":
            self.desk.load(ticket, text(body, "name"), text(body, "folder", 4096), replace=body.get("replace") is True)
        elif op == "unload":
            self.desk.unload(ticket, text(body, "name"))
        elif op == "pin":
            self.desk.pin(ticket, text(body, "name"), body.get("pinned") is True)
        elif op == "stats":
            self.desk.stats(ticket)
        elif op == "hello":
            self._send(peer, {"beat": self.desk.is_alive()})
        else:
            room = next((room for room in self._rooms if isinstance(op, str) and op in room.operations), None)
            if room is None:
                raise BadMessage(f"op is {op!r:.40}: expected hello, submit, cancel, load, unload, pin or stats")
            room.do(ticket, body)


def _order(ticket: str, body: Body) -> GenerateRequest:
    wishes = body.get("sampling")
    if not isinstance(wishes, dict) or not wishes.keys() <= _SAMPLING:
        raise BadMessage(f"sampling: expected an object with some of {', '.join(sorted(_SAMPLING))}")
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadMessage("prompt: expected a list of token ids")
    wishes = dict(wishes)
    try:
        if "logit_bias" in wishes:
            wishes["logit_bias"] = {int(token): bias for token, bias in wishes["logit_bias"].items()}
        sampling = Sampling(**wishes)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadMessage(f"sampling: {error}") from None
    n = whole(body.get("n", 1), "n")
    within("n", n, 1, 128, whole=True)
    adapter = None if body.get("adapter") is None else text(body, "adapter")
    tenant = text(body, "tenant") if body.get("tenant") else ""
    return GenerateRequest(id=ticket, prompt=prompt, sampling=sampling, adapter=adapter, tenant=tenant, n=n)


def text(body: Body, name: str, longest: int = _MAX_NAME) -> str:
    """A field of a message. Raises `BadMessage`."""
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise BadMessage(f"{name}: expected a text of 1 to {longest} characters")
    return value


def whole(value: object, name: str) -> int:
    """The same."""
    if type(value) is not int:
        raise BadMessage(f"{name}: expected an integer")
    return value


def _written(event: Event | JobEvent, id: str) -> Any:
    """As it crosses the line. Tokens are most of the traffic: a list each; anything else is an object."""
    if isinstance(event, JobEvent):
        return {"id": id, **event.body}
    if isinstance(event, Token):
        if event.logprobs is None:
            return [id, event.number, event.token]
        return [id, event.number, event.token, event.logprobs.chosen, event.logprobs.top]
    if isinstance(event, Finished):
        body: Body = {"id": id, "end": event.reason.value, "number": event.number, "cached": event.cached}
        return body if event.error is None else {**body, "error": _error(event.error)}
    if isinstance(event, Rejected):
        return {"id": id, "refused": _error(event.error)}
    return {"id": id, "accepted": True} if isinstance(event, Accepted) else {"id": id, "settled": event.body}


def _error(error: SymbiosisError) -> Body:
    return {"code": error.code, "message": str(error), "field": getattr(error, "field", "")}
