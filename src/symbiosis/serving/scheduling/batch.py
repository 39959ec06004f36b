"""What is computed together, and how that comes about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from symbiosis.serving.scheduling.block_manager import Copy
from symbiosis.serving.scheduling.sequence import Sequence


@dataclass(slots=True, eq=False)  # not frozen: hundreds are made in every plan, and that takes twice as long
class Chunk:
    """Tokens `start` to `start + count` of a sequence are computed; if `samples`, the last one's logits choose a token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What is computed together. Rows of one adapter are together, the base model's first; among them decoding first."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[Copy, ...] = ()
    """Pages to copy before anything is written, as one gather and one scatter."""
    missing: tuple[str, ...] = ()
    """Adapters somebody waits for, the most urgent first."""
    preempted: tuple[Sequence, ...] = ()
    """Who had to make room."""

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences for which a token is chosen, in the order of their rows."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]


class BatchBuilder:
    """A pass in the making: rows left, adapters seen, what was decided."""

    __slots__ = (
        "adapters",
        "asked",
        "chunks",
        "closed",
        "copies",
        "draining",
        "missing",
        "now",
        "preempted",
        "refused",
        "rows",
    )

    def __init__(self, rows: int, adapters: set[str], now: float, draining: Mapping[str, str]) -> None:
        self.rows = rows
        self.adapters = adapters  # those that have a slot, or keep one free
        self.now = now
        self.asked: dict[str, bool] = {"": True}
        self.chunks: list[Chunk] = []
        self.copies: dict[Sequence, list[Copy]] = {}
        self.missing: dict[str, None] = {}
        self.preempted: list[Sequence] = []
        self.draining = dict(draining)  # adapter that admits nobody -> adapter that waits for its slot
        self.refused = 0  # how many were passed over because they need too many pages
        self.closed = False  # nobody else is admitted
