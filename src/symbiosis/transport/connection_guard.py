"""The connections of a ZeroMQ socket, and when one is cut off.

libzmq bounds what waits at a socket only by whole messages. It bounds neither the parts of a message that never ends, nor
replies that are never read, nor the number of connections. The guard bounds these. libzmq exposes a connection only as its
file descriptor. The guard cuts a connection off by shutting that descriptor down: libzmq then finds it closed and frees
everything it holds for it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

_CHECK_INTERVAL_S = 0.2
_MAX_UNOWNED = 256  # connections without a channel: new ones, and those whose channels were forgotten
_BYTES_RECEIVED_AT = 128  # offset of the number of received bytes in the kernel's `struct tcp_info`
_LINGER_ZERO = struct.pack("ii", 1, 0)  # when libzmq closes it, the other end gets a reset even if it waits to send
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Connection:
    peer: object
    """Address of the other end, None if unknown: the kernel reuses descriptors."""
    received_bytes: int
    """By the kernel's count, at the last change of `messages`."""
    messages: int
    """Whole messages by this descriptor, earlier connections included."""
    opened_at: float = field(default_factory=time.monotonic)


class ConnectionGuard:
    """The socket's thread calls `record_message`, `assign`, `unassign` and `cut_off`; a thread of the guard does the rest."""

    def __init__(self, guarded: zmq.Socket[bytes], max_bytes_ahead: int) -> None:
        """`max_bytes_ahead`: bytes that one connection may send without completing a message."""
        self._guarded, self._max_bytes_ahead = guarded, max_bytes_ahead
        self._messages: dict[int, int] = {}
        """By descriptor, over all connections that had it."""
        self._open: dict[int, _Connection] = {}
        self._owners: dict[int, object] = {}
        """By descriptor, the owner of the channel on it."""
        self._closing = threading.Event()
        self._monitor = guarded.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._run, name="symbiosis-connections", daemon=True)
        self._thread.start()

    def record_message(self, descriptor: int) -> None:
        """A whole message was received by this descriptor."""
        self._messages[descriptor] = self._messages.get(descriptor, 0) + 1

    def assign(self, descriptor: int, owner: object) -> None:
        """The owner's channel uses this descriptor."""
        self._owners[descriptor] = owner

    def unassign(self, descriptor: int, owner: object) -> None:
        """The owner's channel no longer uses it. No effect if the descriptor has another owner by now."""
        if self._owners.get(descriptor) is owner:
            del self._owners[descriptor]

    def cut_off(self, descriptor: int, owner: object) -> None:
        """Cut the owner's connection off. No effect if the descriptor has another owner by now."""
        if self._owners.get(descriptor, owner) is owner:
            self._shut_down(descriptor)

    def open_connections(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Call before the socket is closed."""
        self._closing.set()
        self._guarded.disable_monitor()  # which wakes the guard's thread
        self._thread.join(30)
        self._monitor.close(0)

    def _shut_down(self, descriptor: int) -> None:
        known = self._open.get(descriptor)
        if known is None:
            return
        try:
            with _duplicate(descriptor) as raw:
                if raw.getpeername() == known.peer:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
                    raw.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._track_events(time.monotonic() + _CHECK_INTERVAL_S)
                self._check_connections()
            except Exception:  # noqa: BLE001 - the other connections stay guarded
                _log.exception("a connection could not be checked")
                self._closing.wait(_CHECK_INTERVAL_S)

    def _track_events(self, deadline: float) -> None:
        """Update `_open` by the socket's events until the deadline."""
        while (left := deadline - time.monotonic()) > 0 and self._monitor.poll(int(1000 * left) + 1):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            descriptor = int(event["value"])
            self._open.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = _Connection(*(_inspect(descriptor) or (None, 0)), self._messages.get(descriptor, 0))

    def _check_connections(self) -> None:
        for descriptor, known in list(self._open.items()):
            state = _inspect(descriptor)
            if state is not None and known.peer is None:  # no descriptor was left to inspect it when it was accepted
                known.peer, known.received_bytes = state
            if state is None or state[0] != known.peer:
                continue  # gone; the event follows
            messages = self._messages.get(descriptor, 0)
            if messages != known.messages:
                known.received_bytes, known.messages = state[1], messages
            ahead = state[1] - known.received_bytes
            if ahead > self._max_bytes_ahead:
                _log.warning("a connection was cut off: it has sent %d bytes of a message that does not end", ahead)
                self._shut_down(descriptor)
        unowned = [each for each in self._open.items() if each[0] not in self._owners]
        unowned.sort(key=lambda each: each[1].opened_at)
        for descriptor, _ in unowned[: max(0, len(unowned) - _MAX_UNOWNED)]:
            self._shut_down(descriptor)


def _duplicate(descriptor: int) -> socket.socket:
    """Another descriptor of the same connection. Raises `OSError`."""
    another = os.dup(descriptor)
    try:
        return socket.socket(fileno=another)
    except OSError:
        os.close(another)
        raise


def _inspect(descriptor: int) -> tuple[object, int] | None:
    """Address of the other end and number of bytes received from it; None if there is no connection."""
    try:
        with _duplicate(descriptor) as raw:
            if raw.family == socket.AF_UNIX:  # a process of the same user
                return raw.getpeername(), 0
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
            is_whole = len(info) == _BYTES_RECEIVED_AT + 8
            return raw.getpeername(), struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0] if is_whole else 0
    except OSError:
        return None
