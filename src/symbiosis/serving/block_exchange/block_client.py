"""The target's end of block fetches: links to other engines, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from symbiosis.errors import BadMessage
from symbiosis.serving.block_exchange import messages
from symbiosis.serving.block_exchange.messages import Piece
from symbiosis.transport.block_ipc import BlockLinks
from symbiosis.transport.engine_ipc import Body, EngineAddress, EngineListener

_SILENCE_S = 5.0
"""A source that sends nothing for so long is gone."""
_POLL_S, _IDLE_S = 0.5, 60.0
_OVERHEAD_BYTES = 1 << 16
_log = logging.getLogger("symbiosis")


class FetchReceiver(Protocol):
    """Called on the thread of the client: its methods must be quick."""

    def receive(self, number: int, piece: Piece, content: bytes | memoryview, seconds: float) -> None:
        """`seconds` since the source could have sent it; 0 for the first piece."""

    def end(self, number: int) -> None:
        """Nothing more comes."""


@dataclass(slots=True)
class _Link:
    count: int
    """Blocks that are fetched."""
    credit: int
    """Blocks that the source may send now."""
    position: int = -1
    """Of the next block; -1: any."""
    ready_s: float = 0.0
    """Time from which on the source could send."""


class BlockClient:
    """Fetches have numbers, chosen by the caller. Every method is thread-safe."""

    def __init__(self, listener: EngineListener, layout: str, block_bytes: int, receiver: FetchReceiver) -> None:
        """`listener`: of this engine's own ports."""
        self._layout, self._block_bytes, self._receiver = layout, block_bytes, receiver
        self._window = messages.window_blocks(block_bytes)
        max_bytes = self._window * block_bytes + _OVERHEAD_BYTES
        self._sockets = BlockLinks(listener, max_bytes)
        self._links: dict[int, _Link] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-blocks-in", daemon=True)
        self._thread.start()

    def fetch(self, number: int, source: EngineAddress, hashes: Sequence[bytes]) -> None:
        """Fetch blocks, from the last one to the first."""
        self._command(partial(self._open, number, source, hashes))

    def take(self, number: int, blocks: int) -> None:
        """So many blocks were written: the source may send more."""
        self._command(partial(self._give_credit, number, blocks))

    def end(self, number: int) -> None:
        """Nothing more is needed."""
        self._command(partial(self._end, number))

    def close(self) -> None:
        self._stopping = True
        self._sockets.wake()
        self._thread.join(timeout=30)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._sockets.wake()

    # On the thread of this object

    def _run(self) -> None:
        try:
            while not self._stopping:
                for number, body, content in self._sockets.receive(_POLL_S if self._links else _IDLE_S):
                    self._receive(number, body, content)
                while self._commands:
                    self._commands.popleft()()
                now = time.monotonic()
                silent = [number for number, link in self._links.items() if link.credit and now - link.ready_s > _SILENCE_S]
                for number in silent:
                    _log.warning("the source of blocks has sent nothing for %g s: they are computed", _SILENCE_S)
                    self._fail(number)
        except BaseException:
            _log.exception("no more blocks are fetched")
            raise
        finally:
            self._sockets.close()

    def _open(self, number: int, source: EngineAddress, hashes: Sequence[bytes]) -> None:
        body, content = messages.encode_fetch(self._layout, hashes, self._window)
        if not self._sockets.open(number, source):
            self._receiver.end(number)
            return
        self._links[number] = _Link(len(hashes), self._window, ready_s=time.monotonic())
        if not self._sockets.send(number, body, content):
            self._fail(number)

    def _give_credit(self, number: int, blocks: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if not link.credit:
            link.ready_s = time.monotonic()
        link.credit += blocks
        if not self._sockets.send(number, messages.encode_credit(blocks)):
            self._fail(number)

    def _end(self, number: int) -> None:
        if self._links.pop(number, None) is not None:
            self._sockets.send(number, messages.encode_end())
            self._sockets.close_link(number)

    def _fail(self, number: int) -> None:
        self._end(number)
        self._receiver.end(number)

    def _receive(self, number: int, body: Body | BadMessage, content: bytes | memoryview) -> None:
        link = self._links.get(number)
        if link is None:  # an earlier message of the same batch was its last
            return
        try:
            if isinstance(body, BadMessage):
                raise body
            if body.get("op") == "end":
                self._fail(number)
                return
            piece = messages.decode_piece(body, content, self._block_bytes)
            is_next = piece.position == link.position or link.position < 0
            if not is_next or piece.blocks > link.credit or piece.position + piece.blocks > link.count:
                where = f"{link.position} of {link.count}"
                raise BadMessage(f"{piece.blocks} blocks at {piece.position}: expected at most {link.credit} at {where}")
        except BadMessage as error:
            _log.warning("the source of blocks sends what was not asked for: %s", error)
            self._fail(number)
            return
        now, is_first = time.monotonic(), link.position < 0
        self._receiver.receive(number, piece, content, 0.0 if is_first else now - link.ready_s)
        link.position, link.credit, link.ready_s = piece.position + piece.blocks, link.credit - piece.blocks, now
