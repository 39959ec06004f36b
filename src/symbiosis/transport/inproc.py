"""The link within one process: messages are passed by reference, without copies or encoding."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import Closed, HelloFirst, SymbiosisError
from symbiosis.transport.base import Link, Peer, Port
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.poller import Wakeup


class PendingReply:
    """The reply to one request, for which one thread waits."""

    __slots__ = ("_lock", "_message")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._message: Message | None = None

    def set(self, message: Message) -> None:
        self._message = message
        self._lock.release()

    def wait(self) -> Message:
        self._lock.acquire()
        assert self._message is not None, "set before released"
        return self._message


class InprocPort(Port):
    address = "inproc"
    same_host = True

    def __init__(self) -> None:
        self._received: deque[tuple[Peer, Message]] = deque()
        self._pending: dict[int, tuple[Peer, PendingReply]] = {}
        self._numbers = itertools.count(1)
        self._wakeup = Wakeup()
        self._closed = False

    def submit(self, peer: Peer, message: Message, pending: PendingReply) -> None:
        if self._closed:
            raise Closed("the executor was closed")
        message.request = next(self._numbers)
        self._pending[message.request] = peer, pending
        self._received.append((peer, message))
        self._wakeup.notify()
        if self._closed:  # closed between the two checks: no reply would follow
            raise Closed("the executor was closed")

    def waitable(self) -> Any:
        return self._wakeup.fileno()

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        self._wakeup.clear()
        for _ in range(limit):
            if not self._received:
                return
            yield self._received.popleft()
        self._wakeup.notify()  # there may be more

    def reply(self, peer: Peer, message: Message) -> bool:
        # Copied before the request is removed: if a copy fails, an error reply can still be sent.
        message.tensors = tuple(_copy_if_shared(tensor) for tensor in message.tensors)
        pending = self._pending.pop(message.request, None)
        if pending is not None:
            pending[1].set(message)
        return pending is not None

    def forget(self, peer: Peer) -> None:
        self._fail_pending("this session was closed", peer)

    def close(self) -> None:
        self._closed = True
        self._fail_pending("the executor was closed")

    def _fail_pending(self, reason: str, only: Peer | None = None) -> None:
        """Set `Closed` as the reply of all pending requests, or of one peer's."""
        for number, (peer, pending) in list(self._pending.items()):
            if (only is None or peer is only) and self._pending.pop(number, None) is not None:
                pending.set(Message.from_error(Closed(reason), number))


def _copy_if_shared(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and alone in its memory."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class InprocLink(Link):
    """One session in the executor's own process. Each thread has its own channel."""

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
        peer = getattr(self._local, "peer", None) or self._connect_thread()
        try:
            return self._send_and_wait(peer, message)
        except HelloFirst:  # the executor has forgotten a silent channel
            return self._send_and_wait(self._connect_thread(), message)

    def _connect_thread(self) -> Peer:
        """A new channel for this thread."""
        peer = self._local.peer = Peer(self._port, b"", None)
        self._send_and_wait(peer, Message(Kind.HELLO, body=self._hello))
        self._peers.append(peer)
        return peer

    def _send_and_wait(self, peer: Peer, message: Message) -> Message:
        pending = PendingReply()
        try:
            self._port.submit(peer, message, pending)
            reply = pending.wait()
        except BaseException:  # interrupted while waiting: a late reply must not meet the next request
            self._local.peer = None
            raise
        if reply.kind is Kind.ERROR:
            raise reply.to_error()
        return reply

    def close(self) -> None:
        """Waiting threads get `Closed`."""
        if not self._closed:
            self._closed = True
            for peer in self._peers:
                if peer.session is None:
                    continue
                try:
                    self._send_and_wait(peer, Message(Kind.BYE))
                except Closed:
                    break  # the executor is gone
                except HelloFirst:
                    pass  # forgotten already

    def model_class(self) -> Any:
        return self._model_class

    def client_tensors(self) -> Any:
        return self._client_tensors()

    def base_tensors(self) -> Any:
        return self._base_tensors()
