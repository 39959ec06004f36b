"""IPC between the engine process and HTTP processes: bounded JSON messages over a socket in a private folder.

The engine's port never blocks and detects a lost peer: it sends a heartbeat every second, and ZeroMQ reports an unreachable
peer. The client runs in asyncio and detects a lost engine: the connection breaks, or heartbeats stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from symbiosis.errors import BadMessage, TooLarge
from symbiosis.transport.poller import Poller, Wakeup

MAX_BYTES = 64 << 20
"""Most bytes of one message: enough for a prompt of a million tokens, or for the events of one step."""
HEARTBEAT_S = 1.0
TIMEOUT_S = 15.0
"""The engine is lost after this long without a message: it sends heartbeats even while it computes."""
_MAX_QUEUED = 4096  # messages per peer and direction
_MAX_DRAINED = 256  # messages received at once
_POLLIN = int(zmq.POLLIN)

Body = dict[str, Any]


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

    def __init__(self, folder: Path) -> None:
        """`folder` must be private to this user: access to the socket is access to every operation."""
        self.path = folder / f"ipc-{os.getpid()}-{secrets.token_hex(4)}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        self._socket.bind(f"ipc://{self.path}")
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
        self._context.term()
        self.path.unlink(missing_ok=True)


class IpcClient:
    """The endpoint of an HTTP process, in an asyncio loop. It does not reconnect."""

    def __init__(self, path: str | Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # unlimited: the engine bounds what it sends
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._last_message_s = time.monotonic()
        self._socket.connect(f"ipc://{path}")

    async def send(self, body: Body) -> None:
        await self._socket.send(encode(body))

    async def messages(self) -> AsyncIterator[Body]:
        """The engine's messages, until the engine is lost."""
        lost = asyncio.ensure_future(self._wait_until_lost())
        received: asyncio.Future[bytes] | None = None
        try:
            while True:
                received = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({lost, received}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    return
                self._last_message_s = time.monotonic()
                yield decode(received.result())
        finally:
            lost.cancel()
            if received is not None:
                received.cancel()

    async def _wait_until_lost(self) -> None:
        disconnected = asyncio.ensure_future(self._monitor.recv_multipart())
        try:
            while time.monotonic() - self._last_message_s < TIMEOUT_S:
                done, _ = await asyncio.wait({disconnected}, timeout=HEARTBEAT_S)
                if done:
                    parse_monitor_message(disconnected.result())
                    return
        finally:
            disconnected.cancel()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=200)
