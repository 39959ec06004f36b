"""The source's end of block fetches: sends blocks of the prefix cache to other engines.

A source knows nothing of the sequence: a request that has left it has left its blocks in the prefix cache, on the device or in
host blocks. They are read between steps, one piece or two at a time, so that sequences that run here are not stalled. A block
that is gone ends the fetch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from symbiosis.errors import BadMessage
from symbiosis.serving.block_exchange import messages
from symbiosis.serving.block_exchange.messages import Piece
from symbiosis.serving.model.block_memory import BlockContent, BlockMemory
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.transport.block_ipc import BlockPort
from symbiosis.transport.engine_ipc import Body, EngineListener

_MAX_FETCHES = 8
_MAX_READS = 2  # begun and not sent: one is read while the other is sent
_IDLE_S = 10.0
"""A target that takes nothing for so long is gone."""
_POLL_S = 1.0
_FINISH_S, _LOOK_S = 5.0, 0.02
_log = logging.getLogger("symbiosis")


@dataclass(slots=True, eq=False)
class _Sending:
    """The blocks that one target fetches."""

    peer: bytes
    hashes: list[bytes]
    credit: int
    used_s: float
    """Time of its last message in either direction."""
    position: int = -1
    """Of the next block to read; -1: none was looked up. Changed by the engine's thread only."""
    num_reads: int = 0
    """Begun and not sent."""

    @property
    def can_read(self) -> bool:
        return self.credit > 0 and (self.position >= 0 or not self.num_reads)


@dataclass(slots=True)
class _Read:
    sending: _Sending
    asked: int
    piece: Piece
    content: BlockContent | None = None


class BlockServer:
    """Listens for targets, on a thread of its own."""

    def __init__(
        self,
        listener: EngineListener,
        block_manager: BlockManager,
        memory: BlockMemory,
        layout: str,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """`layout` must be that of the target. `call` runs a function on the engine's thread, between two steps."""
        self._block_manager, self._memory, self._layout, self._call = block_manager, memory, layout, call
        self._port = BlockPort(listener)
        self._sendings: dict[bytes, _Sending] = {}  # least recently read first
        self._reads: deque[_Read] = deque()
        self._num_reads = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-blocks-out", daemon=True)
        self._thread.start()

    def finish(self, quiet_s: float) -> None:
        """Let targets finish, and those that come within `quiet_s`; for a few seconds at most."""
        started = quiet = time.monotonic()
        while (now := time.monotonic()) - started < _FINISH_S:
            if self._sendings:
                quiet = now
            elif now - quiet >= quiet_s:
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        self._stopping = True
        self._port.wake()
        self._thread.join(timeout=30)

    # On the thread of this object

    def _run(self) -> None:
        try:
            while not self._stopping:
                for peer, body, content in self._port.receive(_POLL_S):
                    self._receive(peer, body, content)
                while self._reads:
                    self._send(self._reads.popleft())
                self._begin_reads()
                now = time.monotonic()
                for sending in [each for each in self._sendings.values() if now - each.used_s > _IDLE_S]:
                    del self._sendings[sending.peer]
        except BaseException:
            _log.exception("no more blocks are sent")
            raise
        finally:
            self._port.close()

    def _receive(self, peer: bytes, body: Body | BadMessage, content: bytes) -> None:
        try:
            if isinstance(body, BadMessage):
                raise body
            self._handle(peer, body, content)
        except BadMessage as error:
            _log.warning("a fetch of blocks is refused: %s", error)
            self._sendings.pop(peer, None)
            self._port.send(peer, messages.encode_end())

    def _handle(self, peer: bytes, body: Body, content: bytes) -> None:
        op, sending = body.get("op"), self._sendings.get(peer)
        if op == "fetch" and sending is None:
            request = messages.decode_fetch(body, content)
            if request.layout != self._layout:
                raise BadMessage(f"the blocks of the target are {request.layout}, those of this engine {self._layout}")
            if len(self._sendings) >= _MAX_FETCHES:
                self._port.send(peer, messages.encode_end())
                return
            self._sendings[peer] = _Sending(peer, request.hashes, request.credit, time.monotonic())
        elif op == "credit":
            credit = messages.decode_credit(body)
            if sending is not None:  # it may have ended meanwhile
                sending.credit = min(sending.credit + credit, messages.MAX_BLOCKS)
                sending.used_s = time.monotonic()
        elif op == "end":
            self._sendings.pop(peer, None)
        else:
            raise BadMessage(f"op is {op!r:.40}: expected one fetch for each link, then credit or end")

    def _begin_reads(self) -> None:
        while self._num_reads < _MAX_READS:
            sending = next((each for each in self._sendings.values() if each.can_read), None)
            if sending is None:
                return
            self._sendings[sending.peer] = self._sendings.pop(sending.peer)
            count = min(sending.credit, messages.piece_blocks(self._memory.block_bytes, len(sending.hashes)))
            sending.credit -= count
            sending.num_reads += 1
            self._num_reads += 1
            self._call(partial(self._read, sending, count))

    def _send(self, read: _Read) -> None:
        sending, piece = read.sending, read.piece
        self._num_reads -= 1
        sending.num_reads -= 1
        if self._sendings.get(sending.peer) is not sending:
            return
        sending.used_s = time.monotonic()
        sending.credit += read.asked - piece.blocks
        is_sent = read.content is not None and self._port.send(sending.peer, messages.encode_piece(piece), read.content.wait())
        if not is_sent or piece.position + piece.blocks == len(sending.hashes):
            del self._sendings[sending.peer]
            self._port.send(sending.peer, messages.encode_end())

    # On the engine's thread

    def _read(self, sending: _Sending, count: int) -> None:
        read = _Read(sending, count, Piece(0, 0))
        try:
            self._look_up(read)
        except Exception:  # noqa: BLE001 - the target computes them
            _log.exception("blocks could not be read")
        self._reads.append(read)
        self._port.wake()

    def _look_up(self, read: _Read) -> None:
        sending, find = read.sending, self._block_manager.find_sent
        if sending.position < 0:  # the last blocks of a sequence are evicted first
            found = (position for position, hash in enumerate(sending.hashes) if find([hash])[0])
            sending.position = next(found, len(sending.hashes))
            self._block_manager.touch(sending.hashes[sending.position :])
        start = sending.position
        blocks, on_host = find(sending.hashes[start : start + read.asked])
        if blocks:
            read.content = self._memory.read(blocks[::-1], on_host=on_host)
            read.piece = Piece(start, len(blocks))
            sending.position += len(blocks)
            self._block_manager.num_sent += len(blocks)
