"""Links over ZeroMQ: what TCP and shared memory have in common.

Frames are `messages`; one frame a message. The executor's end never blocks:
a peer that is gone or does not read is forgotten. The tenant's end keeps
asking until the answer is there: if the executor was restarted it says hello
again and sends the call again, which is safe since layer calls are pure.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from symbiosis import errors
from symbiosis.errors import (
    AddressInUse,
    BadAddress,
    BadMessage,
    Closed,
    ExecutorLost,
    HelloFirst,
    ModelChanged,
    SymbiosisError,
    TooLarge,
    Unauthorized,
    Unreachable,
)
from symbiosis.links import keys
from symbiosis.links.base import Link, Peer, Port
from symbiosis.messages import Kind, Message, decode, encode

_ASK_AGAIN_S = 0.5
_CONNECT_S = 5.0
_SPARE_BYTES = 1 << 20  # header and body beside the tensors
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


@dataclass(slots=True)
class WireState:
    """What a port notes about a peer."""

    nonce: str = ""
    arena: Any = None


class _KnownKeys:
    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = tenants

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._tenants


class WirePort(Port):
    """The executor's end: one ROUTER socket."""

    def __init__(self, endpoint: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._peers: dict[bytes, Peer] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _SPARE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 16)
        self._socket.setsockopt(zmq.SNDHWM, 16)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        self._authenticator: ThreadAuthenticator | None = None
        self._tenants = {keys.tenant_keys(token).public: name for name, token in tokens.items()}
        self._proofs = {name: keys.proof_key(token) for name, token in tokens.items()}
        if tokens:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=_KnownKeys(self._tenants))
            pair = keys.executor_keys()
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"{endpoint} is taken: stop whoever listens there, or choose another (port 0: any)"
                ) from None
            raise BadAddress(f"cannot listen at {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def waitable(self) -> Any:
        return self._socket

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        for _ in range(limit):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = parts[0].bytes
            peer = self._peers.get(key) or Peer(self, key, self._tenant_of(parts[-1]), link_state=WireState())
            if len(parts) != 2:
                yield peer, BadMessage(f"a message of {len(parts) - 1} frames; expected one")
                continue
            try:
                message = decode(parts[1].buffer, max_bytes=self._max_bytes, arena=self._arena_in(peer))
            except SymbiosisError as error:
                yield peer, error
                continue
            if message.kind is Kind.HELLO:
                peer.link_state.nonce = str(message.body.get("nonce", ""))[:64]
            yield peer, message

    def _tenant_of(self, frame: zmq.Frame) -> str | None:
        if not self._tenants:
            return None
        return self._tenants.get(str(frame.get("User-Id")).encode(), "unknown")

    def reply(self, peer: Peer, message: Message) -> bool:
        if message.kind is Kind.WELCOME:
            self._welcome(peer, message)
        arena = self._arena_out(peer) if message.tensors else None
        try:
            frame = encode(message, arena)
        except TooLarge as error:
            frame = encode(Message(Kind.ERROR, message.request, body={"code": error.code, "message": str(error)}))
        try:
            self._socket.send_multipart([peer.key, frame], zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.ZMQError:  # gone (EHOSTUNREACH), or its pipe is full since it does not read (EAGAIN)
            return False
        return True

    def _welcome(self, peer: Peer, message: Message) -> None:
        self._peers[peer.key] = peer
        if peer.tenant is not None:
            message.body["proof"] = keys.prove(self._proofs[peer.tenant], peer.link_state.nonce)

    def _arena_in(self, peer: Peer) -> memoryview | None:
        return None

    def _arena_out(self, peer: Peer) -> memoryview | None:
        return None

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.key, None)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.forget(peer)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


class Channel:
    """One DEALER socket of a tenant, used by one thread at a time."""

    def __init__(self, link: WireLink) -> None:
        self._link = link
        self._socket = link.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 64)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        if link.token is not None:
            pair = link.keys
            self._socket.curve_serverkey = keys.executor_keys().public
            self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._arena: Any = None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | sum(_HANDSHAKE_FAILED))
        self._socket.connect(link.endpoint)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise
        self._socket.disable_monitor()
        self._monitor = None

    def _hello(self) -> tuple[Message, str]:
        nonce = secrets.token_hex(16)
        return Message(Kind.HELLO, self._link.next_request(), body={**self._link.hello, "nonce": nonce}), nonce

    def _greet(self) -> None:
        hello, nonce = self._hello()
        self._send(hello)
        deadline = time.monotonic() + _CONNECT_S
        while time.monotonic() < deadline:
            if self._socket.poll(50):
                reply = self._receive()
                if reply is not None and reply.kind is Kind.ERROR:
                    raise errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))
                if reply is not None and reply.kind is Kind.WELCOME:
                    self._accept(reply, nonce)
                    return
            self._check_handshake()
        raise Unreachable(
            f"nobody answers at {self._link.address} within {_CONNECT_S:.0f} s: is the executor running there, "
            "and is that the address `symbiosis serve` printed?"
        )

    def _check_handshake(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event in _HANDSHAKE_FAILED:
                if self._link.token is None:
                    raise Unauthorized(f"the executor at {self._link.address} asks for a token: pass token=…")
                raise Unauthorized(
                    f"the executor at {self._link.address} does not know this token (or takes none): ask its provider for yours"
                )

    def _accept(self, welcome: Message, nonce: str) -> None:
        token = self._link.token
        if token is not None:
            expected = keys.prove(self._link.proof_key, nonce)
            if not hmac.compare_digest(expected, str(welcome.body.get("proof", ""))):
                raise Unauthorized(f"whoever answers at {self._link.address} does not know your token: not connected")
        self._link.check_model(str(welcome.body.get("model")))
        self._arena = self._link.open_arena(welcome)
        self._link.welcome = welcome.body

    def ask(self, message: Message) -> Message:
        """Send, wait, ask again, say hello again; gives up after the grace period."""
        self._send(message)
        heard = asked = time.monotonic()
        nonce, greeted = "", 0.0
        while True:
            wait_ms = 50 if time.monotonic() - asked < _ASK_AGAIN_S else 0
            if self._socket.poll(wait_ms):
                reply = self._receive()
                heard = time.monotonic()
                if reply is None:
                    continue
                if reply.kind is Kind.WELCOME and nonce:
                    self._accept(reply, nonce)
                    nonce = ""
                    self._send(message)
                    asked = time.monotonic()
                elif reply.kind is Kind.ERROR and reply.body.get("code") == HelloFirst.code:
                    if not nonce or heard - greeted > _ASK_AGAIN_S:
                        hello, nonce = self._hello()
                        greeted = heard
                        self._send(hello)
                elif reply.kind is Kind.PING and reply.request == message.request:
                    if not reply.body.get("known"):
                        self._send(message)
                elif reply.request == message.request or (reply.kind is Kind.ERROR and reply.request == 0):
                    return reply
                continue
            now = time.monotonic()
            if self._link.closed:
                raise Closed("this session was closed; connect again")
            if now - heard > self._link.grace_s:
                raise ExecutorLost(
                    f"the executor at {self._link.address} has not answered for {self._link.grace_s:.0f} s "
                    "(the grace period); restart it and run again"
                )
            if now - asked >= _ASK_AGAIN_S:
                self._send(Message(Kind.PING, message.request))
                asked = now

    def _send(self, message: Message) -> None:
        frame = encode(message, self._arena_half(0) if message.tensors else None)
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again:
            pass  # not connected now: asked again until the grace period ends

    def _receive(self) -> Message | None:
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        message = decode(frame.buffer, max_bytes=1 << 32, arena=self._arena_half(1))
        if self._arena is not None and message.tensors:
            # the arena is written again by the next call; the tenant keeps its rows
            message.tensors = tuple(tensor.clone() for tensor in message.tensors)
        return message

    def _arena_half(self, half: int) -> memoryview | None:
        if self._arena is None:
            return None
        middle = len(self._arena) // 2
        view: memoryview = self._arena[:middle] if half == 0 else self._arena[middle:]
        return view

    def leave(self) -> None:
        """Tell the executor that this channel ends; it need not answer."""
        self._socket.setsockopt(zmq.LINGER, 100)
        self._send(Message(Kind.BYE, self._link.next_request()))
        self.close()

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None
        self._socket.close()


class WireLink(Link):
    """A tenant's session: as many channels as threads call at once."""

    def __init__(self, address: str, endpoint: str, *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        self.address = address
        self.endpoint = endpoint
        self.token = token
        self.hello = {**hello, "pid": os.getpid()}
        self.grace_s = grace_s
        self.closed = False
        self.welcome: dict[str, Any] = {}
        self.context = zmq.Context()
        if token is not None:
            self.keys = keys.tenant_keys(token)
            self.proof_key = keys.proof_key(token)
        self._model: str | None = None
        self._lock = threading.Lock()
        self._free: list[Channel] = []
        self._requests = 0
        try:
            self._free.append(Channel(self))
        except BaseException:
            self.context.term()
            raise

    def next_request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    def check_model(self, model: str) -> None:
        if self._model is not None and model != self._model:
            raise ModelChanged(f"the executor at {self.address} was restarted with another model: connect again")
        self._model = model

    def open_arena(self, welcome: Message) -> Any:
        return None

    def request(self, message: Message) -> Message:
        if self.closed:
            raise Closed("this session was closed; connect again")
        message.request = self.next_request()
        with self._lock:
            channel = self._free.pop() if self._free else None
        if channel is None:
            channel = Channel(self)
        try:
            reply = channel.ask(message)
        except BaseException:
            # interrupted or lost: a late answer must not meet the next request
            channel.close()
            raise
        with self._lock:
            self._free.append(channel)
        if reply.kind is Kind.ERROR:
            raise errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))
        return reply

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for channel in self._free:
            channel.leave()
        self.context.destroy(linger=100)


def runtime_folder() -> Path:
    """A folder of this user for sockets; nobody else can look in."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    folder = Path(base) / f"symbiosis-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadAddress(f"{folder} belongs to somebody else or is open to others: remove it and try again")
    return folder
