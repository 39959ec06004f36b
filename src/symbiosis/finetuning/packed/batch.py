"""Rows of many sessions as one sequence: where each begins, whose it is, what is to be learned.

R = rows of the pass, N = rows with a label.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from symbiosis.finetuning.examples import IGNORED, Example
from symbiosis.finetuning.packed.dropout import drop
from symbiosis.finetuning.packed.lora_math import Drop, Part
from symbiosis.finetuning.trained_adapter import TrainedAdapter

if TYPE_CHECKING:  # it needs Triton
    from symbiosis.finetuning.packed.lora_tables import LoraTables

Array: TypeAlias = npt.NDArray[np.int64]

_LONGEST, _SEQUENCES, _SESSIONS = 512, 16, 8  # at least so many, and powers of two: the kernels skip what is not there
_DENSE = 0.9  # of all rows have a label: choosing them would cost more than it saves


@dataclass(frozen=True, slots=True)
class PackedExample:
    """An example in a pass."""

    example: Example
    items: float
    """What the sum of its losses is divided by."""
    key: str
    """Names it for dropout: the session's seed, the call's number, the example's. Empty: nothing is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionSlice:
    """What one session has in a pass."""

    adapter: TrainedAdapter
    pieces: tuple[PackedExample, ...]
    learns: bool = True
    """Whether gradients are wanted of it."""

    @property
    def rows(self) -> int:
        return sum(self.adapter.rows_of(len(piece.example.ids)) for piece in self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class RowSpan:
    """A sequence's rows, and the keys and values that an adapter puts in front of them."""

    rows: int
    prefix_L2HTD: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchAdapters:
    """What the sessions of a pass do at one layer: runs of rows, in order."""

    sizes: list[int]
    parts: list[Part | None]
    drops: list[Drop]


class PackedBatch:
    """A pass before it is computed. Rows of one session lie together."""

    def __init__(
        self,
        shares: Sequence[SessionSlice],
        device: torch.device,
        *,
        dense: bool = False,
        even: bool = False,
        window: int | None = None,
    ) -> None:
        """`dense`: where nearly all rows have a label, the head sees all of them, and those without are ignored.

        `even`: with rows of nobody at the end, so that passes of about the same size are of the same. `window`: the tokens
        that a layer sees; sequences that fit are not made out to be longer.
        """
        self.shares = shares
        self.device = device
        self.spans: list[RowSpan] = []
        self.embeds: list[tuple[int, Tensor]] = []
        """Rows (by the first) whose embeddings an adapter gives."""
        ids: list[Array] = []
        places: list[Array] = []
        wanted: list[Array] = []
        labels: list[Array] = []
        self._rows: list[list[int]] = []
        self._head_rows: list[list[int]] = []
        start = 0
        for share in shares:
            virtual = share.adapter.virtual
            front = virtual.rows if virtual else 0
            given = virtual.embeddings_TD() if virtual and front else None
            prefix = virtual.keys_values_L2HTD() if virtual and not front else None
            before = virtual.count if virtual else 0
            self._rows.append([])
            self._head_rows.append([])
            for piece in share.pieces:
                tokens, learned = np.array(piece.example.ids), np.array(piece.example.labels)
                if given is not None:
                    self.embeds.append((start, given))
                ids += [np.zeros(front, np.int64), tokens]
                places.append(np.arange(before - front, before + len(tokens)))
                rows = front + len(tokens)
                self.spans.append(RowSpan(rows, prefix))
                # a row predicts the token after it; the last virtual token predicts the first
                due = np.flatnonzero(learned != IGNORED)
                due = due[due > 0] if not front else due
                wanted.append(start + front + due - 1)
                labels.append(learned[due])
                self._rows[-1].append(rows)
                self._head_rows[-1].append(len(due))
                start += rows
        self.longest = max(span.rows for span in self.spans)
        spare = sessions = 0
        if even and any(span.rows != self.longest for span in self.spans):
            rounded = _power_of_2(self.longest, _LONGEST)
            self.longest = rounded if window is None or self.longest > window else min(rounded, window)
            spare = -start % _step(start)
            self.spans += [RowSpan(min(self.longest, spare - at)) for at in range(0, spare, self.longest)]
            self.spans += [RowSpan(0)] * (_power_of_2(len(self.spans), _SEQUENCES) - len(self.spans))
            sessions = _SESSIONS
        start += spare
        ids.append(np.zeros(spare, np.int64))
        places.append(np.arange(spare) % self.longest)
        self.rows = start
        self.edges_S = _to(device, np.cumsum([0, *(span.rows for span in self.spans)], dtype=np.int32))
        """Where sequences begin, and the end of the last."""
        chosen, known = np.concatenate(wanted), np.concatenate(labels)
        dense = dense and len(chosen) >= _DENSE * (start - spare)
        spare_head = -len(chosen) % _step(len(chosen)) if even and not dense else 0
        if dense:
            every = np.full(start, IGNORED)
            every[chosen] = known
            chosen, known, spare_head = np.arange(0), every, spare
            self._head_rows = self._rows
        elif spare_head:
            chosen = np.concatenate([chosen, np.zeros(spare_head, np.int64)])
            known = np.concatenate([known, np.full(spare_head, IGNORED)])
        counted = [1 / piece.items if share.learns else 0.0 for share in shares for piece in share.pieces]
        upstream = np.repeat(np.array([*counted, 0.0], np.float32), [*self.head_rows, spare_head])
        parts = [np.concatenate(ids), np.concatenate(places), known, chosen]
        sizes = [len(part) for part in parts]
        self._numbers = _to(device, np.concatenate(parts))
        self.ids_R, self.places_R, self.labels_N, rows_N = torch.split(self._numbers, sizes)
        self.wanted_N: Tensor | None = None if dense else rows_N
        """Rows that the head sees; None for all."""
        self.upstream_N = _to(device, upstream)
        """What each label's loss counts."""
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}
        """What attention has worked out for this pass."""
        self.by_lengths = False
        """Something was computed by how long each sequence is, and not by `edges_S`: this pass is like no other."""
        self._acts: dict[tuple[str, bool], BatchAdapters | None] = {}
        self.grouped = self._grouped(sessions)

    @property
    def head_rows(self) -> list[int]:
        """How many rows of each piece the head sees."""
        return [rows for of_share in self._head_rows for rows in of_share]

    def _grouped(self, least: int) -> LoraTables | None:
        """Of the sessions whose adapters the kernels take together, with room for so many."""
        flats = [share.adapter.flat for share in self.shares if share.adapter.flat is not None]
        if not flats:
            return None
        from symbiosis.finetuning.packed.lora_tables import LoraTables

        return LoraTables(flats, self._segments(self._rows), self._segments(self._head_rows), self.rows, self.device, least)

    @property
    def key(self) -> tuple[object, ...] | None:
        """Passes of the same key differ in `tensors` only; None if more than plain LoRA is in this one."""
        if self.grouped is None or any(share.adapter.flat is None for share in self.shares):
            return None
        alike = all(span.rows == self.longest for span in self.spans)
        return self.rows, len(self.labels_N), self.wanted_N is None, len(self.spans), self.longest, alike, *self.grouped.key

    @property
    def tensors(self) -> list[Tensor]:
        """All that changes from pass to pass, if it has a key."""
        assert self.grouped is not None
        return [self._numbers, self.upstream_N, self.edges_S, *self.grouped.tensors]

    def frame(self) -> PackedBatch:
        """One that knows nobody, over the same tensors: others of the key may be copied into it."""
        frame = copy.copy(self)
        frame.shares = ()
        frame.masks, frame._acts = {}, {}  # what is captured is not computed
        assert self.grouped is not None
        frame.grouped = copy.copy(self.grouped)
        frame.grouped.gradients = []
        return frame

    def _segments(self, by_piece: list[list[int]]) -> list[tuple[int, int]]:
        """First row and number of rows of each of these sessions."""
        found, start = [], 0
        for share, rows in zip(self.shares, by_piece, strict=True):
            if share.adapter.flat is not None:
                found.append((start, sum(rows)))
            start += sum(rows)
        return found

    def acts(self, path: str, *, of_head: bool) -> BatchAdapters | None:
        """What is done at a layer by those that are not `grouped`; None if nothing. The head does not see all rows."""
        if (path, of_head) not in self._acts:
            self._acts[path, of_head] = self._find(path, self._head_rows if of_head else self._rows)
        return self._acts[path, of_head]

    def _find(self, path: str, by_piece: list[list[int]]) -> BatchAdapters | None:
        parts = [None if share.adapter.flat is not None else share.adapter.parts.get(path) for share in self.shares]
        if not any(parts):
            return None
        acts = BatchAdapters([], [], [])
        for share, sizes, part in zip(self.shares, by_piece, parts, strict=True):
            if part is None and acts.parts and acts.parts[-1] is None:
                acts.sizes[-1] += sum(sizes)
                continue
            acts.sizes.append(sum(sizes))
            acts.parts.append(part)
            acts.drops.append(partial(drop, layer=path, keys=[piece.key for piece in share.pieces], sizes=sizes))
        return acts


def _to(device: torch.device, numbers: npt.NDArray[np.generic]) -> Tensor:
    """There, without waiting for what is computed there."""
    found = torch.from_numpy(numbers)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _power_of_2(number: int, least: int) -> int:
    """The next one from `number` on."""
    return max(least, 1 << max(0, number - 1).bit_length())


def _step(rows: int) -> int:
    """What passes of about so many rows are rounded up to: a sixteenth at most is thrown away."""
    return max(16, 1 << max(0, rows.bit_length() - 5))


def predicted(adapter: TrainedAdapter, example: Example) -> int:
    """How many tokens of an example are learned: with virtual tokens in front, also the first."""
    front = adapter.virtual.rows if adapter.virtual else 0
    return sum(label != IGNORED for label in (example.labels if front else example.labels[1:]))
