"""Accepts connections from a socket that several processes share."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from symbiosis.server.connections.shared_counts import SharedCounts

_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 0.1
_DEFER_S = 0.001
_STARTUP_FAILURE = 3


class Listener(uvicorn.Server):
    """One connection in each turn of the event loop: a burst spreads over the processes, and a busy one takes less of it.

    A process with more connections than another leaves it a moment to take the next one. The first signal calls `drain`;
    requests are served as before for `shutdown_delay_s`, in which load balancers find another server.
    """

    def __init__(
        self, config: uvicorn.Config, counts: SharedCounts | None, drain: Callable[[], None], shutdown_delay_s: float
    ) -> None:
        super().__init__(config)
        self._counts, self._drain, self._shutdown_delay_s = counts, drain, shutdown_delay_s
        self._exit_at = 0.0
        """0: no signal yet."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain()
        if self.started and self._shutdown_delay_s and not self._exit_at:
            self._exit_at = time.monotonic() + self._shutdown_delay_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        return is_over or 0 < self._exit_at <= time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(_STARTUP_FAILURE)

        def create_protocol() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        self.servers = [_Acceptor(each, create_protocol, self._counts) for each in sockets or ()]  # type: ignore[misc]
        self.started = True


class _Acceptor:
    """What uvicorn needs of an asyncio server."""

    def __init__(
        self, listening: socket.socket, create_protocol: Callable[[], asyncio.Protocol], counts: SharedCounts | None
    ) -> None:
        self._socket, self._create_protocol, self._counts = listening, create_protocol, counts
        self._has_waited = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False
        listening.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        self._has_waited = not self._has_waited and self._counts is not None and not self._counts.is_low()
        if self._has_waited:
            self._pause(_DEFER_S)
            return
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another process was first
            return
        except OSError as error:
            if error.errno not in _NO_FILES:
                raise
            self._pause(_RETRY_S)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._create_protocol, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.fileno())

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)
