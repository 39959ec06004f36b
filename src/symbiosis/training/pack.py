"""Rows of many sessions as one sequence: where each begins, whose it is, what is to be learned.

R = rows of the pass, N = rows with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from symbiosis.training.adapter import Trained
from symbiosis.training.changes import Drop, Part
from symbiosis.training.dropout import drop
from symbiosis.training.examples import IGNORED, Example


@dataclass(frozen=True, slots=True)
class Piece:
    """An example in a pass."""

    example: Example
    items: float
    """What the sum of its losses is divided by."""
    key: str
    """Names it for dropout: the session's seed, the call's number, the example's. Empty: nothing is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one session has in a pass."""

    adapter: Trained
    pieces: tuple[Piece, ...]
    learns: bool = True
    """Whether gradients are wanted of it."""

    @property
    def rows(self) -> int:
        return sum(self.adapter.rows_of(len(piece.example.ids)) for piece in self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A sequence's rows, and the keys and values that an adapter puts in front of them."""

    rows: int
    prefix_L2HTD: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Acts:
    """What the sessions of a pass do at one layer: runs of rows, in order."""

    sizes: list[int]
    parts: list[Part | None]
    drops: list[Drop]


class Pack:
    """A pass before it is computed. Rows of one session lie together."""

    def __init__(self, shares: Sequence[Share], device: torch.device) -> None:
        self.shares = shares
        self.device = device
        self.spans: list[Span] = []
        self.embeds: list[tuple[int, Tensor]] = []
        """Rows (by the first) whose embeddings an adapter gives."""
        ids: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        labels: list[int] = []
        self._rows: list[list[int]] = []
        self._labels: list[list[int]] = []
        for share in shares:
            virtual = share.adapter.virtual
            front = virtual.rows if virtual else 0
            given = virtual.embeddings_TD() if virtual and front else None
            prefix = virtual.keys_values_L2HTD() if virtual and not front else None
            before = virtual.count if virtual else 0
            self._rows.append([])
            self._labels.append([])
            for piece in share.pieces:
                example, start = piece.example, len(ids)
                if given is not None:
                    self.embeds.append((start, given))
                ids += [0] * front
                ids += example.ids
                places += range(before - front, before + len(example.ids))
                self.spans.append(Span(len(ids) - start, prefix))
                # a row predicts the token after it; the last virtual token predicts the first
                due = [(start + front + at - 1, label) for at, label in enumerate(example.labels) if label != IGNORED]
                due = [(row, label) for row, label in due if row >= start]
                wanted += [row for row, _ in due]
                labels += [label for _, label in due]
                self._rows[-1].append(len(ids) - start)
                self._labels[-1].append(len(due))
        self.ids_R = torch.tensor(ids, device=device)
        self.places_R = torch.tensor(places, device=device)
        self.wanted_N = torch.tensor(wanted, dtype=torch.int64, device=device)
        self.labels_N = torch.tensor(labels, dtype=torch.int64, device=device)
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}
        """What attention has worked out for this pass."""
        self._acts: dict[tuple[str, bool], Acts | None] = {}

    def labels_by_piece(self) -> list[list[int]]:
        """How many labels each piece of each share has."""
        return self._labels

    def acts(self, path: str, *, of_head: bool) -> Acts | None:
        """What is done at a layer; None if nothing. The head sees the rows with a label only."""
        if (path, of_head) not in self._acts:
            self._acts[path, of_head] = self._find(path, self._labels if of_head else self._rows)
        return self._acts[path, of_head]

    def _find(self, path: str, by_piece: list[list[int]]) -> Acts | None:
        if not any(path in share.adapter.parts for share in self.shares):
            return None
        acts = Acts([], [], [])
        for share, sizes in zip(self.shares, by_piece, strict=True):
            part = share.adapter.parts.get(path)
            if part is None and acts.parts and acts.parts[-1] is None:
                acts.sizes[-1] += sum(sizes)
                continue
            acts.sizes.append(sum(sizes))
            acts.parts.append(part)
            acts.drops.append(partial(drop, layer=path, keys=[piece.key for piece in share.pieces], sizes=sizes))
        return acts


def predicted(adapter: Trained, example: Example) -> int:
    """How many tokens of an example are learned: with virtual tokens in front, also the first."""
    front = adapter.virtual.rows if adapter.virtual else 0
    return sum(label != IGNORED for label in (example.labels if front else example.labels[1:]))
