"""The link within one process: messages are handed over by reference, nothing is copied or encoded."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from symbiosis import errors
from symbiosis.errors import Closed, HelloFirst, SymbiosisError
from symbiosis.transport.base import Link, Peer, Port
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.poller import Wakeup


class InprocPort(Port):
    address = "inproc"
    same_host = True

    def __init__(self) -> None:
        self._arrived: deque[tuple[Peer, Message]] = deque()
        self._waiting: dict[int, tuple[Peer, _Answer]] = {}
        self._numbers = itertools.count(1)
        self._wakeup = Wakeup()
        self._closed = False

    def submit(self, peer: Peer, message: Message, answer: _Answer) -> None:
        if self._closed:
            raise Closed("the executor was closed")
        message.request = next(self._numbers)
        self._waiting[message.request] = peer, answer
        self._arrived.append((peer, message))
        self._wakeup.notify()
        if self._closed:  # closed between the two checks: nobody will answer
            raise Closed("the executor was closed")

    def waitable(self) -> Any:
        return self._wakeup.fileno()

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        self._wakeup.clear()
        for _ in range(limit):
            if not self._arrived:
                return
            yield self._arrived.popleft()
        self._wakeup.notify()  # there may be more

    def reply(self, peer: Peer, message: Message) -> bool:
        message.tensors = tuple(_own(tensor) for tensor in message.tensors)  # before: whoever waits can be told if that fails
        waiting = self._waiting.pop(message.request, None)
        if waiting is not None:
            waiting[1].give(message)
        return waiting is not None

    def forget(self, peer: Peer) -> None:
        self._end("this session was closed", peer)

    def close(self) -> None:
        self._closed = True
        self._end("the executor was closed")

    def _end(self, why: str, only: Peer | None = None) -> None:
        """Nobody waits for an answer that will not come."""
        for number, (peer, answer) in list(self._waiting.items()):
            if (only is None or peer is only) and self._waiting.pop(number, None) is not None:
                answer.give(Message(Kind.ERROR, number, body={"code": Closed.code, "message": why}))


def _own(tensor: Tensor) -> Tensor:
    """The tensor in memory that it shares with nobody."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


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
        self,
        port: InprocPort,
        *,
        hello: dict[str, Any],
        model_class: type,
        client_tensors: Callable[[], dict[str, Any]],
        base_tensors: Callable[[], dict[tuple[int, str], Tensor]],
    ) -> None:
        self._port = port
        self._hello = hello
        self._model_class = model_class
        self._client_tensors = client_tensors
        self._base_tensors = base_tensors
        self._local = threading.local()
        self._closed = False
        self._peers: list[Peer] = []

    def request(self, message: Message) -> Message:
        if self._closed:
            raise Closed("this session was closed; connect again")
        peer = getattr(self._local, "peer", None)
        if peer is None:
            peer = self._hello_as_new_peer()
        try:
            return self._ask(peer, message)
        except HelloFirst:  # silent for so long that it was forgotten
            return self._ask(self._hello_as_new_peer(), message)

    def _hello_as_new_peer(self) -> Peer:
        peer = self._local.peer = Peer(self._port, b"", None)
        self._ask(peer, Message(Kind.HELLO, body=self._hello))
        self._peers.append(peer)
        return peer

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
        """Threads that wait for an answer get `Closed`."""
        if not self._closed:
            self._closed = True
            for peer in self._peers:
                if peer.session is None:
                    continue
                try:
                    self._ask(peer, Message(Kind.BYE))
                except Closed:
                    break  # the executor is gone: there is nobody to take leave of
                except HelloFirst:
                    pass  # forgotten already

    def model_class(self) -> Any:
        return self._model_class

    def client_tensors(self) -> Any:
        return self._client_tensors()

    def base_tensors(self) -> Any:
        return self._base_tensors()
