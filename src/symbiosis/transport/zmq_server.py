"""The executor's end of links over ZeroMQ: what TCP and shared memory have in common.

Frames are `messages`; one frame a message. This end never blocks: a peer that
is gone or does not read is forgotten.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator

from symbiosis.errors import AddressInUse, BadAddress, BadMessage, SymbiosisError, TooLarge
from symbiosis.transport import curve_keys
from symbiosis.transport.base import Peer, Port
from symbiosis.transport.connection_guard import ConnectionGuard
from symbiosis.transport.messages import Kind, Message, decode, encode

MAX_REQUEST_BODY = 16 << 10
"""Most bytes of JSON a tenant sends; it only ever sends a few names and numbers."""
_SPARE_BYTES = 64 << 10  # header, descriptors and body beside the tensors
_POLLIN = int(zmq.POLLIN)  # enums are slow
_WAITING = 2  # messages per peer and direction, each perhaps as large as they come: a call and a ping are under way
_AHEAD = _WAITING + 2  # messages: those, one that is read here, and one that is coming
_LEAST_ID = 16  # bytes of a routing id that nobody guesses
_KEEPALIVE_S = 30
_NONCE = re.compile(r"[0-9a-f]{16,64}")
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class ZmqPeerState:
    """What a port notes about a peer."""

    nonce: str = ""
    arena: Any = None
    descriptor: int = -1
    """Of its connection, as libzmq knows it."""


class _KnownKeys:
    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = tenants

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._tenants


def _draw_lots() -> None:
    """Let nobody know from where libzmq counts those who bring no routing id: who takes the next number makes it abort."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection it came by; -1 where libzmq does not say (to old versions of itself, which ours are not)."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class ZmqPort(Port):
    """The executor's end: one ROUTER socket."""

    def __init__(self, endpoint: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._peers: dict[bytes, Peer] = {}
        self._tenants = {curve_keys.tenant_keys(token).public: name for name, token in tokens.items()}
        self._proofs = {name: curve_keys.proof_key(token) for name, token in tokens.items()}
        self._authenticator: ThreadAuthenticator | None = None
        self._connections: ConnectionGuard | None = None
        self._context = zmq.Context()
        _draw_lots()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._set_up(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"{endpoint} is taken: stop whoever listens there, or choose another (port 0: any)"
                ) from None
            raise BadAddress(f"cannot listen at {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _set_up(self, endpoint: str) -> None:
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes + _SPARE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        # No heartbeats from here: libzmq aborts if one is due to a peer that has sent too much and left.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S // 3)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        if self._tenants:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=_KnownKeys(self._tenants))
            pair = curve_keys.executor_keys()
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._connections = ConnectionGuard(self._socket, _AHEAD * (self._max_bytes + _SPARE_BYTES))
        self._socket.bind(endpoint)

    def waitable(self) -> Any:
        return self._socket

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        for _ in range(limit):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            key = self._socket.recv(zmq.NOBLOCK)
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            extra = 0
            while frame.more:
                frame, extra = self._socket.recv(zmq.NOBLOCK, copy=False), extra + 1
            peer = self._peer(key, frame)
            self._note(peer, _descriptor(frame))
            if extra:
                yield peer, BadMessage(f"a message of {extra + 1} frames; expected one")
            else:
                yield peer, self._read(peer, frame.buffer)

    def _peer(self, key: bytes, frame: zmq.Frame) -> Peer:
        tenant = self._tenants.get(str(frame.get("User-Id")).encode()) if self._tenants else None
        peer = self._peers.get(key)
        # A peer chooses its routing id freely, so it may be one that somebody else had: only the key tells who it is.
        if peer is None or peer.tenant != tenant:
            return Peer(self, key, tenant, port_state=ZmqPeerState())
        return peer

    def _note(self, peer: Peer, descriptor: int) -> None:
        """It was heard by this connection."""
        assert self._connections is not None
        self._connections.heard(descriptor)
        if peer.port_state.descriptor != descriptor:  # new, or it had to connect again
            if self._peers.get(peer.key) is peer:
                self._connections.left(peer.port_state.descriptor, peer)
                self._connections.belongs(descriptor, peer)
            peer.port_state.descriptor = descriptor

    def _read(self, peer: Peer, frame: memoryview) -> Message | SymbiosisError:
        try:
            message = decode(frame, max_bytes=self._max_bytes, max_body=MAX_REQUEST_BODY, arena=self._arena_in(peer))
        except SymbiosisError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a hole in the checks is the sender's problem, not everybody's
            _log.exception("a frame that decode() should have refused")
            return BadMessage(f"the frame could not be read: {type(error).__name__}")
        if message.kind is Kind.HELLO:
            if len(peer.key) < _LEAST_ID:  # answers go to whoever has it: another could take one that is easily guessed
                return BadMessage(f"a routing id of {len(peer.key)} bytes: set one of {_LEAST_ID} random bytes or more")
            nonce = message.body.get("nonce")
            peer.port_state.nonce = nonce if isinstance(nonce, str) and _NONCE.fullmatch(nonce) else ""
        return message

    def reply(self, peer: Peer, message: Message) -> bool:
        if message.kind is Kind.WELCOME:
            self._welcome(peer, message)
        arena = self._arena_out(peer) if message.tensors else None
        try:
            frame = encode(message, arena)
        except TooLarge as error:
            frame = encode(Message(Kind.ERROR, message.request, body={"code": error.code, "message": str(error)}))
        for last in (False, True):
            try:
                self._socket.send(peer.key, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
                return True
            except zmq.Again:  # its pipe is full since it does not read, or the socket has not looked at it of late
                if not last:
                    self._socket.getsockopt(zmq.EVENTS)
            except zmq.ZMQError:  # gone
                return False
        if self._connections is not None:  # what it was answered stays in memory otherwise
            self._connections.cut(peer.port_state.descriptor, peer)
        return False

    def is_gone(self, peer: Peer) -> bool:
        try:
            self._socket.send(peer.key, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(encode(Message(Kind.PING)), zmq.NOBLOCK)
        except zmq.Again:
            return False  # it has not read its last messages: silent, not gone
        except zmq.ZMQError:
            return True
        return False

    def _welcome(self, peer: Peer, message: Message) -> None:
        assert self._connections is not None
        before = self._peers.get(peer.key, peer)
        self._connections.left(before.port_state.descriptor, before)
        self._connections.belongs(peer.port_state.descriptor, peer)
        self._peers[peer.key] = peer
        if peer.tenant is not None and peer.port_state.nonce:
            message.body["proof"] = curve_keys.prove(self._proofs[peer.tenant], peer.port_state.nonce)

    def _arena_in(self, peer: Peer) -> Tensor | None:
        return None

    def _arena_out(self, peer: Peer) -> Tensor | None:
        return None

    def forget(self, peer: Peer) -> None:
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
            assert self._connections is not None
            self._connections.left(peer.port_state.descriptor, peer)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            try:
                self.forget(peer)
            except Exception:  # noqa: BLE001 - the others are to be let go too
                _log.exception("a channel could not be closed")
        if self._connections is not None:
            self._connections.close()
            self._connections = None
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
