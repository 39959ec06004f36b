"""A TCP relay that adds latency, and nothing else."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType

_CHUNK = 1 << 20


class Relay:
    """Forwards connections to `target` ("host:port"); half of the round trip is added on each way. A context manager.

    Threads, not an event loop: its timers are exact to a millisecond only.
    """

    def __init__(self, target: str, round_trip_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._delay_s = (host, int(port)), round_trip_s / 2
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                pair = self._listener.accept()[0], socket.create_connection(self._target)
                for connection in pair:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections += pair
                for source, sink in (pair, pair[::-1]):
                    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    threading.Thread(target=self._receive, args=(source, held), daemon=True).start()
                    threading.Thread(target=self._send, args=(sink, held), daemon=True).start()

    def _receive(self, source: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            held.put((time.monotonic() + self._delay_s, data))

    def _send(self, sink: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):  # closed by its peer
            while (entry := held.get())[1]:
                time.sleep(max(0.0, entry[0] - time.monotonic()))
                sink.sendall(entry[1])
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
