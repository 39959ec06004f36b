"""The link within one process: messages are handed over by reference, nothing is copied or encoded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from symbiosis import errors
from symbiosis.errors import Closed, SymbiosisError
from symbiosis.links.base import Link, Peer, Port
from symbiosis.links.waiting import Wakeup
from symbiosis.messages import Kind, Message


class InprocPort(Port):
    address = "inproc"

    def __init__(self) -> None:
        self._arrived: deque[tuple[Peer, Message]] = deque()
        self._waiting: dict[Peer, _Answer] = {}
        self._wakeup = Wakeup()
        self._closed = False

    def submit(self, peer: Peer, message: Message, answer: _Answer) -> None:
        if self._closed:
            raise Closed("the executor was closed")
        self._waiting[peer] = answer
        self._arrived.append((peer, message))
        self._wakeup.ring()
        if self._closed:  # closed between the two checks: nobody will answer
            raise Closed("the executor was closed")

    def waitable(self) -> Any:
        return self._wakeup

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        self._wakeup.clear()
        while self._arrived:
            yield self._arrived.popleft()

    def reply(self, peer: Peer, message: Message) -> bool:
        answer = self._waiting.pop(peer, None)
        if answer is not None:
            answer.give(message)
        return answer is not None

    def forget(self, peer: Peer) -> None:
        self._waiting.pop(peer, None)

    def close(self) -> None:
        self._closed = True
        for answer in list(self._waiting.values()):
            body = {"code": Closed.code, "message": "the executor was closed"}
            answer.give(Message(Kind.ERROR, body=body))
        self._waiting.clear()


class _Answer:
    """A place one thread waits at for one message."""

    __slots__ = ("_lock", "_message")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._message: Message | None = None

    def give(self, message: Message) -> None:
        self._message = message
        self._lock.release()

    def wait(self) -> Message:
        self._lock.acquire()
        assert self._message is not None, "given before released"
        return self._message


class InprocLink(Link):
    """One session in the executor's own process; each thread has a channel of its own."""

    def __init__(
        self, port: InprocPort, *, hello: dict[str, Any], model_class: type, client_tensors: Callable[[], dict[str, Any]]
    ) -> None:
        self._port = port
        self._hello = hello
        self._model_class = model_class
        self._client_tensors = client_tensors
        self._local = threading.local()
        self._closed = False
        self._peers: list[Peer] = []

    def request(self, message: Message) -> Message:
        if self._closed:
            raise Closed("this session was closed; connect again")
        peer = getattr(self._local, "peer", None)
        if peer is None:
            peer = self._local.peer = Peer(self._port, b"", None)
            self._peers.append(peer)
            self._ask(peer, Message(Kind.HELLO, body=self._hello))
        return self._ask(peer, message)

    def _ask(self, peer: Peer, message: Message) -> Message:
        answer = _Answer()
        try:
            self._port.submit(peer, message, answer)
            reply = answer.wait()
        except BaseException:  # interrupted while waiting: a late answer must not meet the next request
            self._local.peer = None
            raise
        if reply.kind is Kind.ERROR:
            raise errors.from_code(reply.body["code"], reply.body["message"])
        return reply

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for peer in self._peers:
                try:
                    self._ask(peer, Message(Kind.BYE))
                except SymbiosisError:
                    break  # the executor is gone: there is nobody to take leave of

    def model_class(self) -> Any:
        return self._model_class

    def client_tensors(self) -> Any:
        return self._client_tensors()
