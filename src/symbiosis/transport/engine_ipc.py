"""The line between the engine's process and those that speak HTTP: bounded JSON over a socket in a private folder.

The engine's end never blocks and knows when a peer is gone: it says something
to everybody once a second, and ZeroMQ tells if nobody is there. The other end
is for asyncio, and knows when the engine is gone: the connection breaks, or
nothing is heard for a while.
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
"""Of one message: a prompt of a million tokens, or the answers of one pass, take less."""
BEAT_S = 1.0
SILENCE_S = 15.0
"""An engine not heard for so long is lost: it beats every second, also while it computes."""
_WAITING = 4096  # messages per peer and direction
_DRAIN_AT_ONCE = 256
_POLLIN = int(zmq.POLLIN)

Body = dict[str, Any]


def encode(body: Body) -> bytes:
    """Raises `TooLarge`."""
    frame = json.dumps(body, separators=(",", ":")).encode()
    if len(frame) > MAX_BYTES:
        raise TooLarge(f"a message of {len(frame)} bytes: at most {MAX_BYTES} go over the line")
    return frame


def decode(frame: bytes) -> Body:
    """Raises `BadMessage`."""
    try:
        body = json.loads(frame)
    except (ValueError, RecursionError):
        raise BadMessage("a frame that is no JSON") from None
    if not isinstance(body, dict):
        raise BadMessage("a frame that is no JSON object")
    return body


class IpcPort:
    """The engine's end. One thread uses it; `ring` is for all."""

    def __init__(self, folder: Path) -> None:
        """`folder` belongs to this user alone: who can reach the socket may do everything."""
        self.path = folder / f"line-{os.getpid()}-{secrets.token_hex(4)}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING)
        self._socket.bind(f"ipc://{self.path}")
        self._wakeup, self._waiter = Wakeup(), Poller()
        self._waiter.add(self._socket)
        self._waiter.add(self._wakeup.fileno())

    def ring(self) -> None:
        """Let `wait` return."""
        self._wakeup.notify()

    def wait(self, timeout_s: float) -> list[tuple[bytes, Body | BadMessage]]:
        """What has arrived, by peer; waits until something has, somebody rings, or the time is up."""
        self._waiter.wait(timeout_s)
        self._wakeup.clear()
        arrived: list[tuple[bytes, Body | BadMessage]] = []
        while len(arrived) < _DRAIN_AT_ONCE and int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                arrived.append((peer, decode(frames[0] if len(frames) == 1 else b"")))
            except BadMessage as error:
                arrived.append((peer, error))
        return arrived

    def send(self, peer: bytes, body: Body) -> bool:
        """False if the peer is gone, or has not read thousands of messages: forget it."""
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
    """The other end, in an asyncio loop. Once lost, it stays lost."""

    def __init__(self, path: str | Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # read at once, whatever comes; the engine bounds what it sends
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._heard = time.monotonic()
        self._socket.connect(f"ipc://{path}")

    async def send(self, body: Body) -> None:
        await self._socket.send(encode(body))

    async def messages(self) -> AsyncIterator[Body]:
        """What the engine says, until it is gone."""
        gone = asyncio.ensure_future(self._gone())
        heard: asyncio.Future[bytes] | None = None
        try:
            while True:
                heard = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({gone, heard}, return_when=asyncio.FIRST_COMPLETED)
                if not heard.done():
                    return
                self._heard = time.monotonic()
                yield decode(heard.result())
        finally:
            gone.cancel()
            if heard is not None:
                heard.cancel()

    async def _gone(self) -> None:
        """Returns when the engine is."""
        broken = asyncio.ensure_future(self._monitor.recv_multipart())
        try:
            while time.monotonic() - self._heard < SILENCE_S:
                done, _ = await asyncio.wait({broken}, timeout=BEAT_S)
                if done:
                    parse_monitor_message(broken.result())
                    return
        finally:
            broken.cancel()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=200)
