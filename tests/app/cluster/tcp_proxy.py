"""A TCP proxy whose network breaks: while it is cut, no byte passes and no connection is closed."""

from __future__ import annotations

import selectors
import socket
import threading

_POLL_S = 0.05
_CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections to another address, on a thread of its own, until closed."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._cut = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def heal(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for each in (*self._peers, self._listener):
            each.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._cut.is_set():
                self._closing.wait(_POLL_S)
                continue
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                    self._forward(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        target = self._peers[source]
        try:
            data = source.recv(_CHUNK)
            if data:
                target.sendall(data)
                return
        except OSError:
            pass
        for each in (source, target):
            del self._peers[each]
            self._selector.unregister(each)
            each.close()
