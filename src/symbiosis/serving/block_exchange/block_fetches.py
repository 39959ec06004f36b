"""Sequences whose blocks another engine may have: which blocks are fetched, and how much is computed meanwhile.

A sequence computes its tokens from the front, and blocks arrive from the back, until the two meet. What it computes next is the
part of the gap that it would compute while the rest is copied, by the measured rates of both; half of it unless that is short,
since rates change. While nothing arrives that part grows, so a source that is gone delays nothing for long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from symbiosis.common.cost_model import CostModel
from symbiosis.serving.block_exchange.messages import Piece
from symbiosis.serving.model.block_memory import BlockMemory, ReceivedBlocks
from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.block_fetch import meet_in_the_middle
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.sequence import Sequence, SequenceState
from symbiosis.transport.engine_ipc import EngineAddress

_MAX_FETCHES = 4  # at a time: each may have a window of bytes in host memory
_START_S = 0.01
_WORTHWHILE = 0.85
_MIN_ROWS = 32  # a smaller step measures the reading of the weights
_FIRST_TOKENS = 128  # of a chunk, until rates are known
_SHORT_S = 0.02  # a chunk is not halved below
_FADE = 0.9  # of rates, with each step and each piece
_COPY_BYTES_PER_S = 1e9  # until it is measured
_NO_LIMIT = 1 << 40
_log = logging.getLogger("symbiosis")


class BlockSource(Protocol):
    """`BlockClient` documents it."""

    def fetch(self, number: int, source: EngineAddress, hashes: Seq[bytes]) -> None: ...
    def take(self, number: int, blocks: int) -> None: ...
    def end(self, number: int) -> None: ...


@dataclass(slots=True)
class _Fetch:
    sequence: Sequence
    source: EngineAddress
    end: int
    """Index after the last block that is fetched."""
    preemptions: int
    """Of the sequence then: a preemption replaces its blocks."""
    since_s: float
    """Time from which on the source could send."""
    has_received: bool = False


class BlockFetches:
    """Used by the engine's thread."""

    def __init__(self, block_manager: BlockManager, memory: BlockMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_manager, self._memory, self._clock = block_manager, memory, clock
        self._client: BlockSource | None = None
        self._waiting: dict[Sequence, EngineAddress] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._count = 0
        self._compute, self._copy = CostModel(_FADE), CostModel(_FADE)  # of one key: tokens and seconds
        self._last: tuple[int, float] | None = None
        """Rows computed so far, and the time, before the last step."""
        self.start_s = _START_S
        """Expected time to the first block: a prefix that is computed in less is not fetched."""

    def connect(self, client: BlockSource) -> None:
        """Fetch with this client from now on."""
        self._client = client

    def add(self, sequence: Sequence, source: EngineAddress) -> None:
        """A queued sequence: `source` may have its blocks."""
        self._waiting[sequence] = source
        if self._has_room() and self._is_worthwhile(len(sequence.tokens)):
            sequence.chunk_limit = self._limit(len(sequence.tokens), 0.0)

    def prepare(self, num_rows: int) -> None:
        """Before a step is scheduled: limit the chunks of sequences whose blocks are fetched. `num_rows` computed so far."""
        for sequence in [each for each in self._waiting if each.state is SequenceState.FINISHED]:
            del self._waiting[sequence]
        for number in list(self._fetches):
            self._end_if_met(number)
        if not self._fetches:
            self._last = None
            return
        self._memory.wait_for_last()  # what was launched is not computed yet
        now = self._clock()
        if self._last is not None and num_rows - self._last[0] >= _MIN_ROWS:
            self._compute.observe("", num_rows - self._last[0], now - self._last[1])
        self._last = num_rows, now
        for fetch in self._fetches.values():
            missing = self._block_manager.missing_blocks(fetch.sequence)
            tokens = missing.stop * self._block_manager.block_size - fetch.sequence.num_computed_tokens
            fetch.sequence.chunk_limit = self._limit(tokens, now - fetch.since_s)

    def start(self, batch: Batch) -> None:
        """After a step was scheduled: fetch the blocks of sequences that run now."""
        if not self._waiting:
            return
        size = self._block_manager.block_size
        for chunk in [each for each in batch.chunks if each.sequence in self._waiting]:
            sequence, missing = chunk.sequence, self._block_manager.missing_blocks(chunk.sequence)
            missing = missing[-(-(chunk.start + chunk.count) // size) - missing.start :]  # without those of this step
            if self._client is None or not self._is_worthwhile(len(missing) * size):
                del self._waiting[sequence]
            elif self._has_room():
                self._count += 1
                source = self._waiting.pop(sequence)
                self._fetches[self._count] = _Fetch(sequence, source, missing.stop, sequence.preemptions, self._clock())
                self._client.fetch(self._count, source, self._block_manager.hashes(sequence, missing)[::-1])
                continue
            sequence.chunk_limit = _NO_LIMIT

    def receive(self, number: int, piece: Piece, received: ReceivedBlocks, seconds: float) -> None:
        """Write the blocks of a piece, which was checked. `seconds` it took to come; 0 if that is not known."""
        if seconds:
            self._copy.observe("", piece.blocks * self._block_manager.block_size, seconds)
        if self._end_if_met(number):
            return
        fetch = self._fetches[number]
        sequence, end = fetch.sequence, fetch.end - piece.position
        blocks = range(max(end - piece.blocks, self._block_manager.missing_blocks(sequence).start), end)
        if not blocks:  # they are computed, and so are all before them
            self._end(number)
            return
        try:
            self._memory.write([sequence.block_table[index] for index in blocks], received)
        except Exception:  # noqa: BLE001 - nothing depends on these blocks
            _log.exception("blocks of another engine could not be written: they are computed")
            self._end(number)
            return
        self._block_manager.add_received(sequence, blocks)
        fetch.has_received = True
        if not self._end_if_met(number):
            fetch.since_s = self._clock()
            assert self._client is not None
            self._client.take(number, piece.blocks)

    def end(self, number: int) -> None:
        """The source sends nothing more: the rest is computed."""
        if (fetch := self._fetches.pop(number, None)) is not None:
            fetch.sequence.chunk_limit = _NO_LIMIT

    def _end(self, number: int) -> None:
        if number in self._fetches:
            assert self._client is not None
            self._client.end(number)
            self.end(number)

    def _end_if_met(self, number: int) -> bool:
        """Whether nothing more is fetched: the two have met, or the sequence has lost its blocks.

        A preempted sequence fetches again when it resumes.
        """
        fetch = self._fetches.get(number)
        if fetch is None:
            return True
        sequence = fetch.sequence
        has_blocks = sequence.state is SequenceState.RUNNING and sequence.preemptions == fetch.preemptions
        if has_blocks and not (fetch.has_received and not sequence.received) and self._block_manager.missing_blocks(sequence):
            return False
        self._end(number)
        if not has_blocks and sequence.state is not SequenceState.FINISHED:
            self.add(sequence, fetch.source)
        return True

    def _has_room(self) -> bool:
        return len(self._fetches) < _MAX_FETCHES

    def _seconds_per_token(self) -> tuple[float | None, float]:
        """To compute (None: unknown) and to copy."""
        token_bytes = self._memory.block_bytes / self._block_manager.block_size
        copy_s = self._copy.seconds_per_row("")
        return self._compute.seconds_per_row(""), token_bytes / _COPY_BYTES_PER_S if copy_s is None else copy_s

    def _is_worthwhile(self, tokens: int) -> bool:
        """Whether all are there clearly sooner than if they are computed: a fetch costs both engines some time."""
        compute_s, copy_s = self._seconds_per_token()
        if not tokens or compute_s is None:
            return tokens > _FIRST_TOKENS or (tokens > 0 and not self.start_s)
        move = meet_in_the_middle(tokens, compute_s=compute_s, copy_s=copy_s, start_s=self.start_s)
        return move.seconds <= _WORTHWHILE * tokens * compute_s

    def _limit(self, tokens: int, silence_s: float) -> int:
        """Most tokens of the next chunk: whole blocks of those that would be computed until the two meet."""
        compute_s, copy_s = self._seconds_per_token()
        size, most = self._block_manager.block_size, _FIRST_TOKENS
        if compute_s is not None:
            computed = meet_in_the_middle(tokens, compute_s=compute_s, copy_s=copy_s, start_s=silence_s).computed
            most = computed if computed * compute_s <= _SHORT_S else computed // 2
        return max(1, -(-most // size)) * size
