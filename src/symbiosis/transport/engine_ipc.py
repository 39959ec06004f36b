"""Links between the engine process and HTTP processes: bounded messages.

On one host they are sockets in a private folder. Between the hosts of a cluster they are TCP with CURVE: the engine has a key
pair of its own, and serves the holder of the cluster's client key. Engines exchange blocks over sockets of `block_ipc`.

A message is a JSON object. The tokens of each step are a binary frame, the same for all processes, over a second socket: the
engine's stepping thread sends it, so that no other thread of that process wakes for each step.

The engine's port never blocks and detects a lost peer: it sends a heartbeat every second, and ZeroMQ reports an unreachable
peer. The client runs in asyncio and detects a lost engine: the connection breaks, or heartbeats stop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from symbiosis.errors import BadAddress, BadMessage, TooLarge
from symbiosis.transport.addresses import parse_tcp_address, runtime_folder
from symbiosis.transport.poller import Poller, Wakeup

MAX_BYTES = 64 << 20
"""Most bytes of one message: enough for a prompt of a million tokens, or for the events of one step."""
HEARTBEAT_S = 1.0
TIMEOUT_S = 15.0
"""The engine is lost after this long without a message: it sends heartbeats even while it computes."""
_MAX_QUEUED = 4096  # messages per peer and direction
_MAX_DRAINED = 256  # messages received at once
_RETRY_S = 0.001
_KEY_BYTES = 32
_MAX_TEXT = 512
_POLLIN = int(zmq.POLLIN)

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens, for its clients."""

    messages: str
    tokens: str
    key: str = ""
    """The engine's public key; empty within one host."""
    blocks: str = ""
    """For other engines, which fetch blocks of its KV cache; empty: it sends none."""
    local: str = ""
    """The same for engines of this user on its host: a socket in the user's folder, without encryption."""

    def to_json(self) -> Body:
        return asdict(self)

    @staticmethod
    def from_json(body: object) -> EngineAddress:
        """Raises `BadMessage`."""
        if not isinstance(body, dict) or not all(isinstance(each, str) and len(each) <= _MAX_TEXT for each in body.values()):
            raise BadMessage(f"an engine's address: expected an object of texts of at most {_MAX_TEXT} characters")
        try:
            return EngineAddress(**body)
        except TypeError:
            raise BadMessage("an engine's address: expected messages, tokens, key, blocks and local") from None

    @staticmethod
    def in_folder(path: str | Path) -> EngineAddress:
        return EngineAddress(f"ipc://{path}", f"ipc://{path}-tokens", blocks=f"ipc://{path}-blocks")


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A key pair from the cluster's secret: by default that of all clients of its engines and its director."""

    public: bytes
    secret: bytes

    @staticmethod
    def of(secret: str, purpose: str = "cluster") -> ClusterKey:
        """`secret`: at least 16 random characters; guessing is bounded by their number only."""
        raw = z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=f"symb {purpose}".encode()).digest())
        return ClusterKey(zmq.curve_public(raw), raw)

    @staticmethod
    def of_director(secret: str) -> ClusterKey:
        """That of the director itself: a restarted director has it again."""
        return ClusterKey.of(secret, "director")


class EngineListener:
    """Where an engine's ports listen: in a private folder, or on a host with encryption."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        host: str = "",
        port: int = 0,
        clients: ClusterKey | None = None,
        keys: ClusterKey | None = None,
    ) -> None:
        """`folder` must be private to this user: access to the socket is access to every operation.

        `port` 0: any; another is for a service without tokens. `keys`: its own key pair; None: a new one.
        """
        self.path = None if folder is None else folder / f"ipc-{os.getpid()}-{secrets.token_hex(4)}"
        self._host, self._port, self._clients = host, port, clients
        self._keys: tuple[bytes, bytes] | None = None
        if clients is not None:
            self._keys = zmq.curve_keypair() if keys is None else (keys.public, keys.secret)
        if self.path is None and clients is None:
            raise ValueError("an engine that listens on a host needs the key of its clients")
        self._authenticators: list[ThreadAuthenticator] = []
        self._found: dict[str, str] = {}

    def bind(self, socket: zmq.Socket[bytes], context: zmq.Context[Any], name: str) -> None:
        """`name` is messages, tokens or blocks. Raises `zmq.ZMQError`."""
        if self.path is not None:
            self._found[name] = getattr(EngineAddress.in_folder(self.path), name)
            socket.bind(self._found[name])
            return
        assert self._keys is not None
        assert self._clients is not None
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        self._authenticators.append(authenticator)
        authenticator.configure_curve_callback(domain="*", credentials_provider=_OneKey(self._clients.public))
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        socket.setsockopt(zmq.IPV6, int("[" in self._host))
        socket.bind(f"tcp://{self._host}:{self._port or '*'}")
        self._found[name] = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def bind_local(self, socket: zmq.Socket[bytes]) -> bool:
        """Serve engines on the same host, too. False: it does already, or the user's folder cannot be used."""
        if self.path is not None:
            return False
        try:
            local = f"ipc://{runtime_folder()}/ipc-{os.getpid()}-{secrets.token_hex(4)}-blocks"
            socket.bind(local)
        except (BadAddress, OSError, zmq.ZMQError):
            return False
        self._found["local"] = local
        return True

    @property
    def address(self) -> EngineAddress:
        """Once its ports are bound. A service without tokens has one."""
        key = "" if self._keys is None else self._keys[0].decode()
        tokens, blocks, local = (self._found.get(name, "") for name in ("tokens", "blocks", "local"))
        return EngineAddress(self._found["messages"], tokens, key, blocks, local)

    def check_source(self, address: EngineAddress) -> None:
        """Raise `BadMessage` unless it is an engine that this one may fetch blocks from: of its folder, or of its cluster."""
        if self.path is not None:
            path = Path(address.blocks.removeprefix("ipc://"))
            if not address.blocks.startswith("ipc://") or path.parent != self.path.parent or address.key:
                raise BadMessage("source: expected an engine in the folder of this one")
            return
        try:
            is_known = parse_tcp_address(address.blocks)[1] > 0 and len(z85.decode(address.key.encode())) == _KEY_BYTES
        except (BadAddress, ValueError, KeyError):
            is_known = False
        if not is_known:
            raise BadMessage("source: expected tcp://HOST:PORT of an engine's blocks, and its public key")

    def connect(self, socket: zmq.Socket[bytes], address: EngineAddress) -> None:
        """Connect to the blocks of another engine, which was checked: on this host, or with the key of the cluster."""
        is_local = self._clients is not None and _is_local(address.local)
        if self._clients is not None and not is_local:
            socket.curve_serverkey = address.key.encode()
            socket.curve_publickey, socket.curve_secretkey = self._clients.public, self._clients.secret
            socket.setsockopt(zmq.IPV6, int("[" in address.blocks))
        socket.connect(address.local if is_local else address.blocks)

    def stop(self) -> None:
        """Before the contexts of the ports end."""
        while self._authenticators:
            self._authenticators.pop().stop()

    def remove_file(self, name: str) -> None:
        """That of a closed socket, if it has one."""
        if self._found.get(name, "").startswith("ipc://"):
            Path(self._found[name].removeprefix("ipc://")).unlink(missing_ok=True)


def _is_local(address: str) -> bool:
    """Whether it is a socket for blocks in this user's folder on this host."""
    path = Path(address.removeprefix("ipc://"))
    try:
        return address == f"ipc://{runtime_folder()}/{path.name}" and path.name.endswith("-blocks") and path.is_socket()
    except (BadAddress, OSError, ValueError):
        return False


class _OneKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._public)


def encode(body: Body) -> bytes:
    """Raises `TooLarge`."""
    frame = json.dumps(body, separators=(",", ":")).encode()
    if len(frame) > MAX_BYTES:
        raise TooLarge(f"message too large: {len(frame)} bytes > {MAX_BYTES} allowed")
    return frame


def decode(frame: bytes) -> Body:
    """Raises `BadMessage`."""
    try:
        body = json.loads(frame)
    except (ValueError, RecursionError):
        raise BadMessage("the frame is not JSON: expected a JSON object") from None
    if not isinstance(body, dict):
        raise BadMessage(f"the frame is a JSON {type(body).__name__}: expected a JSON object")
    return body


class IpcPort:
    """The engine's endpoint. Used by one thread, except for `wake`."""

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        listener.bind(self._socket, self._context, "messages")
        self._wakeup, self._poller = Wakeup(), Poller()
        self._poller.add(self._socket)
        self._poller.add(self._wakeup.fileno())

    def wake(self) -> None:
        """Make `receive` return. Thread-safe."""
        self._wakeup.notify()

    def receive(self, timeout_s: float) -> list[tuple[bytes, Body | BadMessage]]:
        """Messages by peer. Waits for a message, for `wake`, or for the timeout."""
        self._poller.wait(timeout_s)
        self._wakeup.clear()
        received: list[tuple[bytes, Body | BadMessage]] = []
        while len(received) < _MAX_DRAINED and int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                received.append((peer, decode(frames[0] if len(frames) == 1 else b"")))
            except BadMessage as error:
                received.append((peer, error))
        return received

    def send(self, peer: bytes, body: Body) -> bool:
        """False if the peer is lost, or has thousands of unread messages."""
        try:
            self._socket.send_multipart([peer, encode(body)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._listener.stop()
        self._context.term()
        self._listener.remove_file("messages")


class TokenPort:
    """The engine's endpoint for tokens. Used by one thread, except for `add` and `remove`."""

    def __init__(self, listener: EngineListener) -> None:
        """`listener` is that of the `IpcPort`. A peer has the same identity at both."""
        self._listener = listener
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        listener.bind(self._socket, self._context, "tokens")
        self._peers: frozenset[bytes] = frozenset()
        self._lock = threading.Lock()

    def add(self, peer: bytes) -> None:
        """Send it tokens from now on."""
        with self._lock:
            self._peers |= {peer}

    def remove(self, peer: bytes) -> None:
        with self._lock:
            self._peers -= {peer}

    def greet(self, peer: bytes) -> None:
        """An empty frame, if the peer has connected."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([peer, b""], zmq.NOBLOCK)

    def send(self, frame: bytes) -> list[bytes]:
        """The peers that are lost, or have thousands of unread frames: they get no more."""
        lost = []
        for peer in self._peers:
            try:
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
            except zmq.ZMQError:
                lost.append(peer)
        for peer in lost:
            self.remove(peer)
        return lost

    def close(self) -> None:
        self._socket.close()
        self._listener.stop()
        self._context.term()
        self._listener.remove_file("tokens")


class IpcClient:
    """The endpoint of an HTTP process, in an asyncio loop. It does not reconnect.

    The loop watches ZeroMQ's file descriptors itself: a future for each message would cost more than the message.
    """

    def __init__(self, address: EngineAddress, key: ClusterKey | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """`key` is the cluster's, for an engine on a host. The engine is lost after `timeout_s` without a message."""
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket, self._tokens = (self._context.socket(zmq.DEALER) for _ in range(2))
        identity = b"http" + secrets.token_bytes(8)
        for each in (self._socket, self._tokens):
            each.setsockopt(zmq.IDENTITY, identity)
            each.setsockopt(zmq.LINGER, 200)
            each.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
            each.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
            each.setsockopt(zmq.RCVHWM, 0)  # unlimited: the engine bounds what it sends
            if address.key:
                assert key is not None, "an engine on a host needs the cluster's key"
                each.curve_serverkey = address.key.encode()
                each.curve_publickey, each.curve_secretkey = key.public, key.secret
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._last_message_s = time.monotonic()
        self._on_message: Callable[[Body], None] = lambda body: None
        self._on_tokens: Callable[[bytes], None] = lambda frame: None
        self._watchdog: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        """Set when the engine is lost."""
        if address.tokens:
            self._tokens.connect(address.tokens)
        self._socket.connect(address.messages)

    def open(self, on_message: Callable[[Body], None], on_tokens: Callable[[bytes], None]) -> None:
        """Pass each message of the engine, and the tokens of each step."""
        self._on_message, self._on_tokens, loop = on_message, on_tokens, asyncio.get_running_loop()
        self._last_message_s = time.monotonic()
        loop.add_reader(self._socket.fileno(), self._receive)
        loop.add_reader(self._tokens.fileno(), self._receive_tokens)
        loop.add_reader(self._monitor.fileno(), self._check_monitor)
        self._watchdog = asyncio.create_task(self._watch())
        self._receive()
        self._receive_tokens()
        self._check_monitor()  # a socket whose state was never asked for does not signal

    async def send(self, body: Body) -> None:
        frame = encode(body)
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                break
            except zmq.Again:  # thousands of messages wait
                await asyncio.sleep(_RETRY_S)
        # The descriptor signals changes only, and a send may have taken over the signal of a message.
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        for _ in range(_MAX_DRAINED):
            if self._socket.closed or not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            self._last_message_s = time.monotonic()
            self._on_message(decode(self._socket.recv(zmq.NOBLOCK)))
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive_tokens(self) -> None:
        for _ in range(_MAX_DRAINED):
            if self._tokens.closed or not int(self._tokens.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            self._on_tokens(self._tokens.recv(zmq.NOBLOCK))
        asyncio.get_running_loop().call_soon(self._receive_tokens)

    def _check_monitor(self) -> None:
        if int(self._monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
            parse_monitor_message(self._monitor.recv_multipart())
            self.lost.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._is_silent():
                self._receive()  # this process may have been stopped: messages wait in the socket then
                if self._is_silent():
                    self.lost.set()
                    return

    def _is_silent(self) -> bool:
        return time.monotonic() - self._last_message_s >= self._timeout_s

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket.fileno())
            loop.remove_reader(self._tokens.fileno())
            loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        for each in (self._monitor, self._socket, self._tokens):
            each.close()
        self._context.destroy(linger=200)
