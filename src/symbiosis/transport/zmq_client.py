"""The tenant's end of links over ZeroMQ: what TCP and shared memory have in common.

A tenant's end keeps asking until the answer is there. If the connection ends
(the executor was restarted, or forgot a silent channel) it connects again,
says hello again and makes the call again, which is safe since layer calls are
pure. A connection never mends itself: whoever answers at the address later
must prove that it knows the token before it gets to see a row.
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
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from symbiosis import errors
from symbiosis.errors import (
    BadAddress,
    Closed,
    ExecutorLost,
    HelloFirst,
    ModelChanged,
    SymbiosisError,
    Unauthorized,
    Unreachable,
)
from symbiosis.transport import curve_keys
from symbiosis.transport.base import Link
from symbiosis.transport.messages import MAX_BODY, Kind, Message, decode, encode

_CONNECT_S = 5.0
_ASK_AGAIN_S = 0.5
_TRY_AGAIN_S = 0.1
_TICK_MS = 50
_MAX_REPLY_BYTES = 1 << 30
_ID_MARK = b"\1"  # ids that begin with 0 are libzmq's own
_HANG_UPS = 4  # in a row, during the handshake: that is no executor being restarted
_ENDED = (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED)
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


_log = logging.getLogger("symbiosis")


class ConnectionCut(Exception):
    """The connection ended. Nothing is lost: make the call again on the next one."""


class Forgotten(ConnectionCut):
    """The executor forgot this channel, which was silent for long: connect again."""


class HungUp(ConnectionCut):
    """The other end hung up during the handshake: it was killed just now, or wants a token."""


class Connection:
    """One DEALER socket to an executor that has proved itself. Used by one thread at a time."""

    def __init__(self, link: ZmqLink, deadline: float) -> None:
        """Raises `ConnectionCut` to be tried again, or the error that makes trying again useless."""
        self._link = link
        self._arena: Tensor | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket = link.context.socket(zmq.DEALER)
        link.sockets.add(self._socket)
        try:
            self._set_up()
            self._greet(deadline)
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTING_ID, _ID_MARK + secrets.token_bytes(31))  # what answers are addressed by
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

    def _greet(self, deadline: float) -> None:
        nonce = secrets.token_hex(16)
        try:
            self._send(Message(Kind.HELLO, self._link.next_request(), body={**self._link.hello, "nonce": nonce}))
        except ConnectionCut:
            self._check()  # it may have ended for a reason
            raise
        while time.monotonic() < deadline:
            reply = self._receive()
            if reply is not None and reply.kind is Kind.ERROR:
                raise errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))
            if reply is not None and reply.kind is Kind.WELCOME:
                self._accept(reply, nonce)
                return
            self._check()
        raise ConnectionCut

    def _check(self) -> None:
        """Raise if the connection has ended, or the link was closed meanwhile."""
        if self._link.closed:
            raise Closed("this session was closed; connect again")
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event in _REFUSED:
                raise self._link.refused()
            raise HungUp if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else ConnectionCut

    def _accept(self, welcome: Message, nonce: str) -> None:
        if self._link.proof_key is not None:
            expected = curve_keys.prove(self._link.proof_key, nonce)
            # as bytes: what the other end sends need not be ASCII
            if not hmac.compare_digest(expected.encode(), str(welcome.body.get("proof", "")).encode(errors="replace")):
                raise Unauthorized(f"whoever answers at {self._link.address} does not know your token: not connected")
        self._link.check_model(str(welcome.body.get("model")))
        self._arena = self._link.open_arena(welcome)
        self._link.welcome = welcome.body

    def ask(self, message: Message) -> Message:
        """Send and wait for as long as the executor shows life. Raises `ConnectionCut`, `ExecutorLost`, `Closed`."""
        self._send(message)
        heard = time.monotonic()
        pinged = False
        while True:
            reply = self._receive()
            if reply is not None:
                heard = time.monotonic()
                if reply.request not in (message.request, 0):
                    continue
                if reply.kind is Kind.ERROR:  # without a number if it could not read what it got
                    if reply.body.get("code") == HelloFirst.code:
                        raise Forgotten
                    return reply
                if reply.request == 0:
                    continue  # it looked whether somebody is here
                if reply.kind is not Kind.PING:
                    return reply
                pinged = False
                if not reply.body.get("known"):
                    self._send(message)
                continue
            self._check()
            silent = time.monotonic() - heard
            if silent > self._link.grace_s:
                raise self._link.lost()
            if silent >= _ASK_AGAIN_S and not pinged:
                self._send(Message(Kind.PING, message.request))
                pinged = True

    def _send(self, message: Message) -> None:
        frame = encode(message, self._arena_half(0) if message.tensors else None)
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:
            raise ConnectionCut from None

    def _receive(self) -> Message | None:
        """What comes within a tick."""
        try:
            frame = self._socket.recv(copy=False)
        except zmq.Again:
            return None
        message = decode(frame.buffer, max_bytes=_MAX_REPLY_BYTES, max_body=MAX_BODY, arena=self._arena_half(1))
        if self._arena is not None and message.tensors:
            # the arena is written again by the next call; the tenant keeps its rows
            message.tensors = tuple(tensor.clone() for tensor in message.tensors)
        return message

    def _arena_half(self, half: int) -> Tensor | None:
        if self._arena is None:
            return None
        middle = len(self._arena) // 2
        return self._arena[:middle] if half == 0 else self._arena[middle:]

    def next_request(self) -> int:
        return self._link.next_request()

    def next_error(self) -> Message:
        """The error that is on its way. Raises `ConnectionCut`."""
        while True:
            reply = self._receive()
            if reply is not None and reply.kind is Kind.ERROR:
                return reply
            self._check()

    def leave(self) -> None:
        """Tell the executor that this channel ends; it need not answer."""
        self._socket.setsockopt(zmq.LINGER, 100)
        with contextlib.suppress(ConnectionCut):  # it knows
            self._send(Message(Kind.BYE, self._link.next_request()))
        self.close()

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._link.sockets.discard(self._monitor)
            self._monitor = None
        self._socket.close()
        self._link.sockets.discard(self._socket)


def _release(context: zmq.Context[Any], sockets: set[zmq.Socket[bytes]]) -> None:
    """Let go of whatever a link still holds: one that was never closed, or whose closing was interrupted."""
    for socket in list(sockets):
        socket.close(0)
    context.term()


class ZmqLink(Link):
    """A tenant's session: as many connections as threads ask at once."""

    def __init__(self, address: str, endpoint: str, *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        self.address = address
        self.endpoint = endpoint
        self.keys = curve_keys.tenant_keys(token) if token is not None else None
        self.proof_key = curve_keys.proof_key(token) if token is not None else None
        self.hello = {**hello, "pid": os.getpid()}
        self.grace_s = grace_s
        self.closed = False
        self.welcome: dict[str, Any] = {}
        self.context = zmq.Context()
        self.sockets: set[zmq.Socket[bytes]] = set()
        # A context waits for its sockets when it goes. Of a link that nobody closed, the garbage collector may take
        # the context first and wait for ever: so somebody else holds the sockets and closes them in order.
        weakref.finalize(self, _release, self.context, self.sockets)
        self._model: str | None = None
        self._lock = threading.Lock()
        self._free: list[Connection] = []
        self._in_use = 0
        self._requests = 0
        try:
            self._free.append(self._connect(_CONNECT_S))
        except BaseException:
            self.closed = True
            self.context.term()
            raise

    # -- what a connection asks its link -----------------------------------------------------

    def next_request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    def check_model(self, model: str) -> None:
        if self._model is not None and model != self._model:
            raise ModelChanged(f"the executor at {self.address} was restarted with another model: connect again")
        self._model = model

    def open_arena(self, welcome: Message) -> Tensor | None:
        return None

    def lost(self) -> SymbiosisError:
        if not self._model:
            return Unreachable(
                f"nobody answers at {self.address} within {_CONNECT_S:.0f} s: is the executor running there, "
                "and is that the address `symbiosis serve` printed?"
            )
        return ExecutorLost(
            f"the executor at {self.address} has not answered for {self.grace_s:.0f} s "
            "(the grace period); restart it and run again"
        )

    def refused(self) -> SymbiosisError:
        if self.keys is None:
            return Unauthorized(
                f"the executor at {self.address} asks for a token: pass token=… (in a shell --token, or SYMBIOSIS_TOKEN)"
            )
        return Unauthorized(
            f"the executor at {self.address} does not know this token (or takes none): ask its provider for yours"
        )

    # -- requests ----------------------------------------------------------------------------

    def connect(self) -> Connection:
        """One more connection, for the caller alone."""
        return self._connect(self.grace_s)

    def _connect(self, patience_s: float) -> Connection:
        """A connection to an executor that answers and has proved itself; tried again for so long."""
        deadline = time.monotonic() + patience_s
        hang_ups = 0
        while True:
            try:
                return Connection(self, deadline)
            except ConnectionCut as cut:
                hang_ups = hang_ups + 1 if isinstance(cut, HungUp) else 0
                if hang_ups >= _HANG_UPS:
                    raise self.refused() from None
                if time.monotonic() >= deadline:
                    raise self.lost() from None
                time.sleep(_TRY_AGAIN_S)

    def request(self, message: Message) -> Message:
        message.request = self.next_request()
        with self._lock:
            if self.closed:
                raise Closed("this session was closed; connect again")
            connection = self._free.pop() if self._free else None
            self._in_use += 1
        try:
            connection, reply = self._ask(connection, message)
        except BaseException:
            self._give_back(None)
            raise
        self._give_back(connection)
        if reply.kind is Kind.ERROR:
            raise errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))
        return reply

    def _ask(self, connection: Connection | None, message: Message) -> tuple[Connection, Message]:
        try:
            while True:
                if connection is None:
                    connection = self._connect(self.grace_s)
                try:
                    return connection, connection.ask(message)
                except ConnectionCut as cut:
                    if not isinstance(cut, Forgotten):
                        _log.warning("the executor at %s is away: waiting up to %.0f s for it", self.address, self.grace_s)
                    connection.close()
                    connection = None
        except BaseException:
            # interrupted or lost: a late answer must not meet the next request
            if connection is not None:
                connection.close()
            raise

    def _give_back(self, connection: Connection | None) -> None:
        with self._lock:
            self._in_use -= 1
            if connection is not None and not self.closed:
                self._free.append(connection)
                return
            last = self.closed and self._in_use == 0
        if connection is not None:
            connection.leave()
        if last:
            _release(self.context, self.sockets)

    def close(self) -> None:
        """Threads that wait for an answer get `Closed`; the last of them takes the context along."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            free, self._free = self._free, []
            last = self._in_use == 0
        for connection in free:
            connection.leave()
        if last:
            _release(self.context, self.sockets)
