"""One keep-alive connection of the load client: HTTP/1.1 over a raw socket, cheap for each frame."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import MutableSequence

from benchmarks.http_load.answer import Answer, join_chunks

_READ_BYTES = 1 << 16
_END_READS = 8
"""The end of an answer is in so many reads: finish_reason, usage and [DONE]."""
_CONNECT_S = 30.0
_RECEIVE_BYTES, _SEGMENT_BYTES = 4096, 536
_FRAME_END, _LAST_CHUNK = b"\n\n", b"0\r\n\r\n"  # no frame contains a bare line end: JSON escapes them
_CLOSED = "the connection was closed before the end of the answer"


class Connection:
    """`read` is called when the socket is readable, until it returns True."""

    __slots__ = (
        *("answer", "fd", "frames", "is_broken", "is_whole", "socket", "unsent"),
        *("_head", "_is_chunked", "_kept", "_length", "_receive", "_rest"),
    )

    def __init__(self, address: tuple[str, int], *, has_small_buffers: bool = False) -> None:
        """With small buffers, some 150 kB on both sides together, the server notices a reader that stalls."""
        self.socket = socket.socket()
        if has_small_buffers:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            # The kernel's send buffer is some segments, which are 64 kB on a loopback device.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        self.socket.settimeout(_CONNECT_S)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.fd, self._receive = self.socket.fileno(), self.socket.recv
        self.frames, self.is_broken, self.unsent = 0, False, b""
        self.answer: Answer | None = None

    def begin(self, answer: Answer, data: bytes, *, keep: bool) -> None:
        """Send a request; `keep` its answer whole. Check `unsent` afterwards."""
        self.answer, self.is_whole = answer, keep
        self._head, self._rest, self._is_chunked, self._length = True, b"", False, -1
        self._kept: MutableSequence[bytes] = [] if keep else deque(maxlen=_END_READS)
        self.unsent = data
        self.flush()

    def flush(self) -> None:
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken, self.unsent = True, b""

    def read(self) -> bool:
        """Take what has come; True once the answer is complete, or the connection is broken."""
        try:
            data = self._receive(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        answer = self.answer
        if not data or answer is None:
            return self._break()
        now = time.monotonic()
        if self._head:
            data = self._read_head(data)
            if self._head:
                return False
        self._kept.append(data)
        if not self._is_chunked:
            self._length -= len(data)
            if self._length > 0:
                return False
            answer.arrivals.append(now)
            answer.done = now
            return True
        buffer = self._rest + data
        frames = buffer.count(_FRAME_END)
        if frames:
            self.frames += frames
            answer.arrivals.append(now)
            buffer = buffer[buffer.rfind(_FRAME_END) + 2 :]
        self._rest = buffer
        if not buffer.endswith(_LAST_CHUNK):
            return False
        answer.done = now
        return True

    def _break(self) -> bool:
        self.is_broken = True
        if self.answer is not None:
            self.answer.done = time.monotonic()
            self.answer.error = _CLOSED
        return True

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head once it is complete; returns what follows it."""
        self._rest += data
        head, found, body = self._rest.partition(b"\r\n\r\n")
        if not found:
            return b""
        assert self.answer is not None
        lines = head.lower().split(b"\r\n")
        self.answer.status = int(lines[0].split(b" ")[1])
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        self._is_chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._length = int(fields.get(b"content-length", 0))
        self.is_broken = fields.get(b"connection") == b"close"
        self._head, self._rest = False, b""
        return body

    def body_end(self) -> bytes:
        """The end of the answer, with marks of chunks."""
        return b"".join(list(self._kept)[-_END_READS:])

    def body(self) -> bytes:
        """Of an answer that was kept whole."""
        raw = b"".join(self._kept)
        return join_chunks(raw) if self._is_chunked else raw

    def close(self) -> None:
        self.socket.close()
