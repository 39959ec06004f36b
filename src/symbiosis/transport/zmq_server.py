"""The executor's end of links over ZeroMQ: what TCP and shared memory have in common.

A frame is one encoded message (`messages`). This end never blocks: it forgets a peer that is gone or does not read.
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
from symbiosis.transport.shared_memory import SharedMemory

_MAX_REQUEST_BODY_BYTES = 16 << 10  # of JSON: a tenant sends only a few names and numbers
_OVERHEAD_BYTES = 64 << 10  # header, descriptors and body, in addition to the tensors
_POLLIN = int(zmq.POLLIN)  # enums are slow
_QUEUED = 2  # messages per peer and direction, each of any allowed size: a call and a ping are in flight
_MAX_AHEAD = _QUEUED + 2  # messages: the queued ones, one being read here, and one being received
_MIN_ROUTING_ID_BYTES = 16  # so that it cannot be guessed
_KEEPALIVE_S = 30
_NONCE = re.compile(r"[0-9a-f]{16,64}")
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class ZmqPeerState:
    """The port's state of a peer."""

    nonce: str = ""
    descriptor: int = -1
    """File descriptor of the peer's connection, as libzmq knows it."""
    arena: SharedMemory | None = None
    call_arena: Tensor | None = None
    """The tenant writes the tensors of its calls here."""
    reply_arena: Tensor | None = None


class _TenantKeys:
    """Accepts the known tenants' keys (a credentials provider of pyzmq)."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = tenants

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._tenants


def _randomise_routing_ids() -> None:
    """libzmq numbers peers without a routing id from `rand()` on. It aborts if a peer has taken the next number."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection that delivered the frame; -1 where an old libzmq does not say."""
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
        self._proof_keys = {name: curve_keys.proof_key(token) for name, token in tokens.items()}
        self._authenticator: ThreadAuthenticator | None = None
        self._guard: ConnectionGuard | None = None
        self._context = zmq.Context()
        _randomise_routing_ids()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._set_up(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"{endpoint} is taken: stop the process that listens there, or choose another (port 0: any)"
                ) from None
            raise BadAddress(f"cannot listen at {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _set_up(self, endpoint: str) -> None:
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes + _OVERHEAD_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        # No heartbeats from here: libzmq aborts if one is due to a peer that has sent too much and left.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S // 3)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        if self._tenants:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=_TenantKeys(self._tenants))
            pair = curve_keys.executor_keys()
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._guard = ConnectionGuard(self._socket, _MAX_AHEAD * (self._max_bytes + _OVERHEAD_BYTES))
        self._socket.bind(endpoint)

    def waitable(self) -> Any:
        return self._socket

    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        for _ in range(limit):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            routing_id = self._socket.recv(zmq.NOBLOCK)
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            extra = 0
            while frame.more:
                frame, extra = self._socket.recv(zmq.NOBLOCK, copy=False), extra + 1
            peer = self._peer_of(routing_id, frame)
            self._record_message(peer, _descriptor(frame))
            if extra:
                yield peer, BadMessage(f"a message of {extra + 1} frames; expected one")
            else:
                yield peer, self._read(peer, frame.buffer)

    def _peer_of(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        tenant = self._tenants.get(str(frame.get("User-Id")).encode()) if self._tenants else None
        peer = self._peers.get(routing_id)
        # A peer chooses its routing id freely, perhaps one that another had: only the CURVE key identifies a tenant.
        if peer is None or peer.tenant != tenant:
            return Peer(self, routing_id, tenant, port_state=ZmqPeerState())
        return peer

    def _record_message(self, peer: Peer, descriptor: int) -> None:
        assert self._guard is not None
        self._guard.record_message(descriptor)
        if peer.port_state.descriptor != descriptor:  # a new peer, or it has connected again
            if self._peers.get(peer.routing_id) is peer:
                self._guard.unassign(peer.port_state.descriptor, peer)
                self._guard.assign(descriptor, peer)
            peer.port_state.descriptor = descriptor

    def _read(self, peer: Peer, frame: memoryview) -> Message | SymbiosisError:
        arena = peer.port_state.call_arena
        try:
            message = decode(frame, max_bytes=self._max_bytes, max_body=_MAX_REQUEST_BODY_BYTES, arena=arena)
        except SymbiosisError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a gap in the checks must fail only the sender
            _log.exception("decode() failed on a frame that it should have rejected")
            return BadMessage(f"the frame could not be read: {type(error).__name__}")
        if message.kind is Kind.HELLO:
            if len(peer.routing_id) < _MIN_ROUTING_ID_BYTES:  # replies are addressed by it: another peer could guess it
                return BadMessage(
                    f"a routing id of {len(peer.routing_id)} bytes: set one of {_MIN_ROUTING_ID_BYTES} random bytes or more"
                )
            nonce = message.body.get("nonce")
            peer.port_state.nonce = nonce if isinstance(nonce, str) and _NONCE.fullmatch(nonce) else ""
        return message

    def reply(self, peer: Peer, message: Message) -> bool:
        if message.kind is Kind.WELCOME:
            self._welcome(peer, message)
        try:
            frame = encode(message, peer.port_state.reply_arena if message.tensors else None)
        except TooLarge as error:
            frame = encode(Message.from_error(error, message.request))
        for is_last_try in (False, True):
            try:
                self._socket.send(peer.routing_id, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
                return True
            except zmq.Again:  # the peer does not read and its queue is full, or the socket's state is outdated
                if not is_last_try:
                    self._socket.getsockopt(zmq.EVENTS)  # updates that state
            except zmq.ZMQError:  # gone
                return False
        if self._guard is not None:  # otherwise its unread replies stay in memory
            self._guard.cut_off(peer.port_state.descriptor, peer)
        return False

    def is_gone(self, peer: Peer) -> bool:
        try:
            self._socket.send(peer.routing_id, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(encode(Message(Kind.PING)), zmq.NOBLOCK)
        except zmq.Again:
            return False  # it has not read its last messages: silent, not gone
        except zmq.ZMQError:
            return True
        return False

    def _welcome(self, peer: Peer, message: Message) -> None:
        """Register the peer, and complete its WELCOME."""
        assert self._guard is not None
        before = self._peers.get(peer.routing_id, peer)
        self._guard.unassign(before.port_state.descriptor, before)
        self._guard.assign(peer.port_state.descriptor, peer)
        self._peers[peer.routing_id] = peer
        if peer.tenant is not None and peer.port_state.nonce:
            message.body["proof"] = curve_keys.prove(self._proof_keys[peer.tenant], peer.port_state.nonce)

    def forget(self, peer: Peer) -> None:
        if self._peers.get(peer.routing_id) is peer:
            del self._peers[peer.routing_id]
            assert self._guard is not None
            self._guard.unassign(peer.port_state.descriptor, peer)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            try:
                self.forget(peer)
            except Exception:  # noqa: BLE001 - the other peers are freed too
                _log.exception("a channel could not be closed")
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
