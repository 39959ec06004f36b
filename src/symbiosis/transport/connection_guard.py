"""Who is connected to a socket of libzmq's. It bounds what waits there by whole messages, and by neither the parts of one that
never ends, nor by answers nobody reads, nor by how many connections there are; so this is done here.

All that libzmq tells is descriptors. A connection is cut off by shutting its descriptor down: libzmq finds it closed, and lets
go of everything it kept for it.
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

_LOOK_EVERY_S = 0.2
_STRANGERS = 256  # connections without a channel: newcomers, and those whose channels were forgotten
_RECEIVED_AT = 128  # where the kernel's `struct tcp_info` says how many bytes have come
_AT_ONCE = struct.pack("ii", 1, 0)  # once libzmq closes it, the other end is told so even if it waits to send
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Connection:
    peer: object
    """What the other end is called, as far as it is called anything: descriptors are used again."""
    received: int
    """Bytes, by the kernel's count, when something was last heard of it, and"""
    heard: int
    """how many messages had been, by whoever had that descriptor."""
    began: float = field(default_factory=time.monotonic)


class ConnectionGuard:
    """`heard`, `belongs`, `left` and `cut` are for the socket's thread; a thread of ours does the rest."""

    def __init__(self, watched: zmq.Socket[bytes], most_ahead: int) -> None:
        """`most_ahead`: bytes that may come by one connection while nothing is heard of it."""
        self._watched, self._most_ahead = watched, most_ahead
        self._heard: dict[int, int] = {}
        """Messages by descriptor, over all connections that had it."""
        self._open: dict[int, _Connection] = {}
        self._owners: dict[int, object] = {}
        """By descriptor, who has a channel there."""
        self._closing = threading.Event()
        self._monitor = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._thread = threading.Thread(target=self._watch, name="symbiosis-connections", daemon=True)
        self._thread.start()

    def heard(self, descriptor: int) -> None:
        """A whole message came by it."""
        self._heard[descriptor] = self._heard.get(descriptor, 0) + 1

    def belongs(self, descriptor: int, owner: object) -> None:
        """Somebody's channel has it."""
        self._owners[descriptor] = owner

    def left(self, descriptor: int, owner: object) -> None:
        """That channel has it no more. It may be another's by now."""
        if self._owners.get(descriptor) is owner:
            del self._owners[descriptor]

    def cut(self, descriptor: int, owner: object) -> None:
        """Who does not read is let go, with all that waits for it; unless that connection is another's by now."""
        if self._owners.get(descriptor, owner) is owner:
            self._cut(descriptor)

    def _cut(self, descriptor: int) -> None:
        found = self._open.get(descriptor)
        if found is None:
            return
        try:
            with _opened(descriptor) as raw:
                if raw.getpeername() == found.peer:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    raw.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone

    def close(self) -> None:
        """Before the socket is closed."""
        self._closing.set()
        self._watched.disable_monitor()  # which wakes our thread
        self._thread.join(30)
        self._monitor.close(0)

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._note(time.monotonic() + _LOOK_EVERY_S)
                self._look()
            except Exception:  # noqa: BLE001 - others are to be watched all the same
                _log.exception("a connection could not be watched")
                self._closing.wait(_LOOK_EVERY_S)

    def _note(self, until: float) -> None:
        """Who comes and who goes."""
        while (left := until - time.monotonic()) > 0 and self._monitor.poll(int(1000 * left) + 1):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            descriptor = int(event["value"])
            self._open.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = _Connection(*(_state(descriptor) or (None, 0)), self._heard.get(descriptor, 0))

    def _look(self) -> None:
        for descriptor, known in list(self._open.items()):
            state = _state(descriptor)
            if state is not None and known.peer is None:  # there was no descriptor left to look at it
                known.peer, known.received = state
            if state is None or state[0] != known.peer:
                continue  # gone, which will be told
            heard = self._heard.get(descriptor, 0)
            if heard != known.heard:
                known.received, known.heard = state[1], heard
            ahead = state[1] - known.received
            if ahead > self._most_ahead:
                _log.warning("a connection was cut off: it has sent %d bytes of a message that does not end", ahead)
                self._cut(descriptor)
        strangers = [each for each in self._open.items() if each[0] not in self._owners]
        strangers.sort(key=lambda each: each[1].began)
        for descriptor, _ in strangers[: max(0, len(strangers) - _STRANGERS)]:
            self._cut(descriptor)


def _opened(descriptor: int) -> socket.socket:
    """Another descriptor of the same connection. Raises `OSError`."""
    another = os.dup(descriptor)
    try:
        return socket.socket(fileno=another)
    except OSError:
        os.close(another)
        raise


def _state(descriptor: int) -> tuple[object, int] | None:
    """Its other end, and how many bytes have come from there; None if there is no connection."""
    try:
        with _opened(descriptor) as raw:
            if raw.family == socket.AF_UNIX:  # a process of the same user
                return raw.getpeername(), 0
            told = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
            return raw.getpeername(), struct.unpack_from("=Q", told, _RECEIVED_AT)[0] if len(told) == _RECEIVED_AT + 8 else 0
    except OSError:
        return None
