"""The tenant's end of links over ZeroMQ: what TCP and shared memory have in common.

A link waits for a reply as long as the executor is alive. If the connection ends (the executor was restarted, or forgot a
silent channel), the link connects again, sends HELLO again and repeats the call, which is safe since layer calls are pure.
With several addresses, of executors of the same model, it goes on at the next one. libzmq never reconnects by itself:
another process at the address must first prove that it has the auth token, before it receives a row.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from symbiosis.errors import (
    BadAddress,
    BadMessage,
    Closed,
    ExecutorLost,
    HelloFirst,
    ModelChanged,
    SymbiosisError,
    Unauthorized,
    Unreachable,
)
from symbiosis.transport import curve_keys
from symbiosis.transport.addresses import speaks_http
from symbiosis.transport.base import Link, Traffic
from symbiosis.transport.messages import Kind, Message, decode, encode
from symbiosis.transport.wire_format import WireFormat

if TYPE_CHECKING:
    from torch import Tensor

_CONNECT_TIMEOUT_S = 5.0
_PING_AFTER_S = 0.5
_RETRY_AFTER_S = 0.1
_SILENT_S = 5.0  # with several addresses: silence after which the next one is tried
_TICK_MS = 50
_MAX_REPLY_BYTES = 1 << 30
_ID_PREFIX = b"\1"  # libzmq's own ids begin with 0
_MAX_HANG_UPS = 4  # in a row, during the handshake: more than a restart of the executor causes
_ENDED = (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED)
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_log = logging.getLogger("symbiosis")


class ConnectionCut(Exception):
    """The connection ended. Nothing is lost: repeat the call on the next connection."""


class Forgotten(ConnectionCut):
    """The executor forgot this silent channel: connect again."""


class HungUp(ConnectionCut):
    """The other end hung up during the handshake: it was just killed, or requires an auth token."""


class Connection:
    """One DEALER socket to an executor that has proved its identity. One thread at a time uses it."""

    def __init__(self, link: ZmqLink, deadline: float) -> None:
        """Raises `ConnectionCut` if a retry may succeed, or the error that rules a retry out."""
        self._link = link
        self._call_arena: Tensor | None = None
        self._reply_arena: Tensor | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket = link.context.socket(zmq.DEALER)
        link.sockets.add(self._socket)
        try:
            self._set_up()
            self._shake_hands(deadline)
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTING_ID, _ID_PREFIX + secrets.token_bytes(31))  # replies are addressed by it
        self._socket.setsockopt(zmq.IPV6, int("[" in self._link.endpoint))
        self._socket.setsockopt(zmq.SNDHWM, 64)
        self._socket.setsockopt(zmq.RCVTIMEO, _TICK_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        if self._link.keys is not None:
            self._socket.curve_serverkey = curve_keys.executor_keys().public
            self._socket.curve_publickey, self._socket.curve_secretkey = self._link.keys.public, self._link.keys.secret
        self._monitor = self._socket.get_monitor_socket(sum(_ENDED) | sum(_REFUSED) | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        self._link.sockets.add(self._monitor)
        try:
            self._socket.connect(self._link.endpoint)
        except zmq.ZMQError as error:
            raise BadAddress(f"cannot connect to {self._link.address}: {error}") from None

    def _shake_hands(self, deadline: float) -> None:
        nonce = secrets.token_hex(16)
        try:
            self.send(Message(Kind.HELLO, self._link.next_request(), body={**self._link.hello, "nonce": nonce}))
        except ConnectionCut:
            self._check_alive()  # raises the reason, if the monitor has one
            raise
        while time.monotonic() < deadline:
            reply = self._receive()
            if reply is not None and reply.kind is Kind.ERROR:
                raise reply.to_error()
            if reply is not None and reply.kind is Kind.WELCOME:
                self._accept_welcome(reply, nonce)
                return
            self._check_alive()
        raise ConnectionCut

    def _check_alive(self) -> None:
        """Raise if the connection has ended, or the link was closed meanwhile."""
        if self._link.closed:
            raise Closed("this session was closed; connect again")
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event in _REFUSED:
                raise self._link.refused_error()
            raise HungUp if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else ConnectionCut

    def _accept_welcome(self, welcome: Message, nonce: str) -> None:
        if self._link.proof_key is not None:
            expected = curve_keys.prove(self._link.proof_key, nonce)
            # as bytes: an untrusted proof need not be ASCII
            if not hmac.compare_digest(expected.encode(), str(welcome.body.get("proof", "")).encode(errors="replace")):
                raise Unauthorized(f"the executor at {self._link.address} does not know your token: not connected")
        self._link.check_model(str(welcome.body.get("model")))
        self._link.wire.check_peer(self._link.address, welcome.body.get("dtypes"))
        self._call_arena, self._reply_arena = self._link.open_arenas(welcome)
        self._link.welcome = welcome.body

    def wait_for(self, message: Message) -> Message:
        """The reply to a message that was sent, an ERROR included. Waits while the executor is alive.

        Raises `ConnectionCut`, `ExecutorLost`, `Closed`.
        """
        last_heard = time.monotonic()
        pinged = False
        while True:
            reply = self._receive()
            if reply is not None:
                last_heard = time.monotonic()
                if reply.request not in (message.request, 0):
                    continue
                if reply.kind is Kind.ERROR:  # number 0 if the executor could not read the message
                    if reply.body.get("code") == HelloFirst.code:
                        raise Forgotten
                    return reply
                if reply.request == 0:
                    continue  # the executor's own ping
                if reply.kind is not Kind.PING:
                    return reply
                pinged = False
                if not reply.body.get("known"):
                    self.send(message)
                continue
            self._check_alive()
            silent_s = time.monotonic() - last_heard
            if silent_s > self._link.grace_s:
                raise self._link.lost_error()
            if silent_s > _SILENT_S and self._link.has_replicas:
                raise ConnectionCut
            if silent_s >= _PING_AFTER_S and not pinged:
                self.send(Message(Kind.PING, message.request))
                pinged = True

    def send(self, message: Message) -> None:
        """Queue a message for sending. Raises `ConnectionCut`."""
        frame = encode(message, self._call_arena if message.tensors else None)
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:
            raise ConnectionCut from None
        self._link.count_traffic(sent_bytes=len(frame))

    def _receive(self) -> Message | None:
        """The next message, or None if none arrives within a tick."""
        try:
            frame = self._socket.recv(copy=False)
        except zmq.Again:
            return None
        self._link.count_traffic(received_bytes=len(frame.buffer))
        message = decode(frame.buffer, max_bytes=_MAX_REPLY_BYTES, arena=self._reply_arena)
        if self._reply_arena is not None and message.tensors:
            # the next call overwrites the arena
            message.tensors = tuple(tensor.clone() for tensor in message.tensors)
        return message

    def next_request(self) -> int:
        return self._link.next_request()

    def next_error(self) -> Message:
        """Wait for the next ERROR. Raises `ConnectionCut`."""
        while True:
            reply = self._receive()
            if reply is not None and reply.kind is Kind.ERROR:
                return reply
            self._check_alive()

    def leave(self) -> None:
        """Send BYE, without waiting for a reply, and close."""
        self._socket.setsockopt(zmq.LINGER, 100)
        with contextlib.suppress(ConnectionCut):
            self.send(Message(Kind.BYE, self._link.next_request()))
        self.close()

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._link.sockets.discard(self._monitor)
            self._monitor = None
        self._socket.close()
        self._link.sockets.discard(self._socket)


def _close_sockets(context: zmq.Context[Any], sockets: set[zmq.Socket[bytes]]) -> None:
    """Free what a link still holds: one that was never closed, or whose close was interrupted."""
    for socket in list(sockets):
        socket.close(0)
    context.term()


class ZmqLink(Link):
    """A tenant's session. It opens as many connections as calls are in flight at once."""

    wire = WireFormat.EXACT

    def __init__(self, places: Sequence[tuple[str, str]], *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        """`places`: address and endpoint of each executor; more than one are replicas."""
        self._places = list(places)
        self.keys = curve_keys.tenant_keys(token) if token is not None else None
        self.proof_key = curve_keys.proof_key(token) if token is not None else None
        self.hello = {**hello, "pid": os.getpid()}
        self.grace_s = grace_s
        self.closed = False
        self.welcome: dict[str, Any] = {}
        self.context = zmq.Context()
        self.sockets: set[zmq.Socket[bytes]] = set()
        # A context waits for its sockets when it is collected. If a link was never closed, the garbage collector may take
        # the context first and wait for ever. The finalizer holds the sockets and closes them in order.
        weakref.finalize(self, _close_sockets, self.context, self.sockets)
        self._model: str | None = None
        self._lock = threading.Lock()
        self._free: list[Connection] = []
        self._in_use = 0
        self._requests = 0
        self._traffic = Traffic()
        try:
            self._free.append(self._connect(_CONNECT_TIMEOUT_S))
        except BaseException as error:
            self.closed = True
            self.context.term()
            if isinstance(error, BadMessage | Unauthorized | Unreachable) and speaks_http(self.address):
                raise BadAddress(
                    f"{self.address} is a port of HTTP, not of an executor: expected the tcp:// or shm:// address that "
                    "`symbiosis serve` prints (port 7777 by default)"
                ) from None
            raise

    @property
    def address(self) -> str:
        """Of the executor that is used now."""
        return self._places[0][0]

    @property
    def endpoint(self) -> str:
        return self._places[0][1]

    @property
    def has_replicas(self) -> bool:
        return len(self._places) > 1

    def traffic(self) -> Traffic:
        with self._lock:
            return replace(self._traffic)

    # -- called by connections ---------------------------------------------------------------

    def count_traffic(self, **added: int) -> None:
        with self._lock:
            self._traffic.add(**added)

    def next_request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    def check_model(self, model: str) -> None:
        if self._model is not None and model != self._model:
            raise ModelChanged(f"the executor at {self.address} was restarted with another model: connect again")
        self._model = model

    def open_arenas(self, welcome: Message) -> tuple[Tensor | None, Tensor | None]:
        """Shared memory for the tensors of calls and of replies, if the link has any."""
        return None, None

    def lost_error(self) -> SymbiosisError:
        if not self._model:
            where = ", ".join(address for address, _ in self._places)
            return Unreachable(
                f"no reply from {where} within {_CONNECT_TIMEOUT_S:.0f} s: is the executor running there, "
                "and is that the address `symbiosis serve` printed?"
            )
        return ExecutorLost(
            f"the executor at {self.address} has not replied for {self.grace_s:.0f} s (the grace period); "
            "restart it and run again"
        )

    def refused_error(self) -> SymbiosisError:
        if self.keys is None:
            return Unauthorized(
                f"the executor at {self.address} requires a token: pass token=… (in a shell --token, or SYMBIOSIS_TOKEN)"
            )
        return Unauthorized(
            f"the executor at {self.address} does not know this token (or takes none): get yours from its provider"
        )

    # -- requests ----------------------------------------------------------------------------

    def connect(self) -> Connection:
        """One more connection, owned by the caller."""
        return self._connect(self.grace_s)

    def _connect(self, timeout_s: float) -> Connection:
        """A connection to an executor that has proved its identity. Retries until the timeout."""
        deadline = time.monotonic() + timeout_s
        hang_ups = 0
        while True:
            try:
                return Connection(self, min(deadline, time.monotonic() + _SILENT_S) if self.has_replicas else deadline)
            except ConnectionCut as cut:
                hang_ups = hang_ups + 1 if isinstance(cut, HungUp) else 0
                if hang_ups >= _MAX_HANG_UPS * len(self._places):
                    raise self.refused_error() from None
                if time.monotonic() >= deadline:
                    raise self.lost_error() from None
                with self._lock:
                    self._places = [*self._places[1:], self._places[0]]
                time.sleep(_RETRY_AFTER_S)

    def request(self, message: Message) -> Message:
        return self.request_all([message])[0]

    def request_all(self, messages: Sequence[Message]) -> list[Message]:
        """The replies, in order. Each message has a connection of its own, and up to `max_in_flight` are sent ahead.

        Raises the first error after the replies of all messages in flight are here.
        """
        ahead = min(len(messages), max(1, self.max_in_flight))
        with self._lock:
            if self.closed:
                raise Closed("this session was closed; connect again")
            connections = [self._free.pop() if self._free else None for _ in range(ahead)]
            self._in_use += ahead
        replies: list[Message] = []
        waiting: list[Connection | None] = []  # in order: connections with a message in flight; None if it was cut
        try:
            for message in messages[:ahead]:
                waiting.append(self._send_ahead(connections.pop(0), message))
            for number, message in enumerate(messages):
                connection, reply = self._wait_until_replied(waiting.pop(0), message)
                replies.append(reply)
                if number + ahead < len(messages):
                    waiting.append(self._send_ahead(connection, messages[number + ahead]))
                else:
                    connections.append(connection)
        except BaseException:
            for cut in waiting:  # a late reply must not meet the next request
                if cut is not None:
                    cut.close()
            connections += [None] * (ahead - len(connections))
            raise
        finally:
            for each in connections:
                self._return_connection(each)
            self.count_traffic(round_trips=-(-len(replies) // ahead), messages=len(replies))
        for reply in replies:
            if reply.kind is Kind.ERROR:
                raise reply.to_error()
        return replies

    def _send_ahead(self, connection: Connection | None, message: Message) -> Connection | None:
        """The connection on which the message is on its way; None if it was cut off."""
        message.request = self.next_request()
        if connection is None:
            connection = self._connect(self.grace_s)
        try:
            connection.send(message)
        except ConnectionCut:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _wait_until_replied(self, connection: Connection | None, message: Message) -> tuple[Connection, Message]:
        """The reply. A message whose connection is cut off is sent again on the next one."""
        try:
            while True:
                try:
                    if connection is not None:
                        return connection, connection.wait_for(message)
                    connection = self._connect(self.grace_s)
                    connection.send(message)
                except ConnectionCut as cut:
                    if not isinstance(cut, Forgotten):
                        what = "trying the others" if self.has_replicas else "waiting for it"
                        _log.warning("the executor at %s is away: %s, up to %.0f s", self.address, what, self.grace_s)
                    if connection is not None:
                        connection.close()
                    connection = None
        except BaseException:
            # interrupted or lost: a late reply must not meet the next request
            if connection is not None:
                connection.close()
            raise

    def _return_connection(self, connection: Connection | None) -> None:
        with self._lock:
            self._in_use -= 1
            if connection is not None and not self.closed:
                self._free.append(connection)
                return
            is_last = self.closed and self._in_use == 0
        if connection is not None:
            connection.leave()
        if is_last:
            _close_sockets(self.context, self.sockets)

    def close(self) -> None:
        """Waiting threads get `Closed`; the last of them terminates the context."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            free, self._free = self._free, []
            is_last = self._in_use == 0
        for connection in free:
            connection.leave()
        if is_last:
            _close_sockets(self.context, self.sockets)
