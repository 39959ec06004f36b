"""Links between engines that exchange blocks of their KV caches.

The source listens next to its other sockets, the target makes one link for each sequence. A message is a JSON object and one
frame of bytes: hashes in one direction, keys and values in the other. Bytes that are sent are not copied. Encryption costs far
more than anything else here, so engines of one user on one host exchange blocks over a socket in the user's folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from symbiosis.errors import BadMessage
from symbiosis.transport.engine_ipc import Body, EngineAddress, EngineListener, decode, encode
from symbiosis.transport.poller import Poller, Wakeup

_MAX_REQUEST_BYTES = 4 << 20  # the hashes of the longest sequence
_MAX_QUEUED = 256  # messages; what a target allows its source to send is bounded by credit
_MAX_DRAINED = 64
_POLLIN = int(zmq.POLLIN)


class BlockPort:
    """The source's endpoint. Used by one thread, except for `wake`."""

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self._context = zmq.Context()
        self._wakeup, self._poller = Wakeup(), Poller()
        self._poller.add(self._wakeup.fileno())
        first, local = self._make_socket(), self._make_socket()
        listener.bind(first, self._context, "blocks")
        listener.bind_local(local)
        self._sockets = [first, local]
        """A peer is known by the number of its socket, and its identity there."""

    def _make_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        self._poller.add(socket)
        return socket

    def wake(self) -> None:
        """Make `receive` return. Thread-safe."""
        self._wakeup.notify()

    def receive(self, timeout_s: float) -> list[tuple[bytes, Body | BadMessage, bytes]]:
        """Messages by peer. Waits for a message, for `wake`, or for the timeout."""
        self._poller.wait(timeout_s)
        self._wakeup.clear()
        received: list[tuple[bytes, Body | BadMessage, bytes]] = []
        for number, socket in enumerate(self._sockets):
            for _ in range(_MAX_DRAINED):
                if not int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                    break
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK)
                body, content = _parse(frames)
                received.append((bytes([number]) + peer, body, bytes(content)))
        return received

    def send(self, peer: bytes, body: Body, content: bytes | memoryview = b"") -> bool:
        """False if the peer is lost, or does not read. `content` must not change any more."""
        try:
            self._sockets[peer[0]].send_multipart([peer[1:], encode(body), content], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._listener.stop()
        self._context.term()
        for name in ("blocks", "local"):
            self._listener.remove_file(name)


class BlockLinks:
    """The target's links, by number. Used by one thread, except for `wake`."""

    def __init__(self, listener: EngineListener, max_bytes: int) -> None:
        """`listener` is that of the target's own ports; `max_bytes` of one message."""
        self._listener, self._max_bytes = listener, max_bytes
        self._context = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._wakeup, self._poller = Wakeup(), Poller()
        self._poller.add(self._wakeup.fileno())

    def wake(self) -> None:
        """Make `receive` return. Thread-safe."""
        self._wakeup.notify()

    def open(self, number: int, address: EngineAddress) -> bool:
        """Connect to a source, which was checked. False: its address is none."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        try:
            self._listener.connect(socket, address)
        except zmq.ZMQError:
            socket.close()
            return False
        self._sockets[number] = socket
        self._poller.add(socket)
        return True

    def send(self, number: int, body: Body, content: bytes = b"") -> bool:
        """False if the source does not read."""
        try:
            self._sockets[number].send_multipart([encode(body), content], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_s: float) -> list[tuple[int, Body | BadMessage, bytes | memoryview]]:
        """Messages by link. Waits for a message, for `wake`, or for the timeout."""
        self._poller.wait(timeout_s)
        self._wakeup.clear()
        received: list[tuple[int, Body | BadMessage, bytes | memoryview]] = []
        for number, socket in self._sockets.items():
            for _ in range(_MAX_DRAINED):
                if not int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                    break
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                received.append((number, *_parse([frame.buffer for frame in frames])))
        return received

    def close_link(self, number: int) -> None:
        socket = self._sockets.pop(number)
        self._poller.remove(socket)
        socket.close()

    def close(self) -> None:
        for number in list(self._sockets):
            self.close_link(number)
        self._context.destroy(linger=0)


def _parse(frames: Sequence[bytes | memoryview]) -> tuple[Body | BadMessage, bytes | memoryview]:
    if len(frames) != 2:
        return BadMessage(f"a message of {len(frames)} frames: expected a JSON object and bytes"), b""
    try:
        return decode(bytes(frames[0])), frames[1]
    except BadMessage as error:
        return error, b""
