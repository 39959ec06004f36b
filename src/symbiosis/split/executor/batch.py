"""Runs a batch: joins the rows of its calls, runs the layers once, splits the result.

Nothing is kept. If a joined run fails, each call is run alone, so that only
the one at fault gets the error.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symbiosis.errors import LayerFailed, SymbiosisError
from symbiosis.split.executor.layers import BaseLayer, Rows, run
from symbiosis.split.executor.policies import BatchKey, PendingCall
from symbiosis.split.executor.sessions import Session

_log = logging.getLogger("symbiosis")


@dataclass(slots=True, weakref_slot=True, eq=False)
class BatchCall:
    """What a call asks for, checked: the same as often as the same words come from the same memory."""

    layers: tuple[BaseLayer, ...]
    key: BatchKey
    rows: Rows
    places: Rows | None
    """Where the results may be computed in place, on the layers' device and in their dtype."""
    bytes: int
    runs: int = 0
    """How often it ran lately,"""
    ran: float = 0.0
    """when it last did, and"""
    replay: Callable[[], object] | None = None
    """what runs it again, if it came often enough (`replays`)."""
    number: int = field(default_factory=itertools.count().__next__)
    """No other work ever has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A checked layer call, from the queue to the answer."""

    pending: PendingCall
    session: Session
    request: int
    work: BatchCall

    @property
    def trains(self) -> bool:
        """Whether it is a trainer's: the first of its step have no gradient, and look like any other."""
        return self.pending.training or self.session.training


@torch.no_grad()
def run_batch(calls: Sequence[Call]) -> list[Rows | SymbiosisError]:
    """The result of each call, in order; the calls have equal batch keys."""
    works = [call.work for call in calls]
    if len(works) > 1:
        try:
            return list(_joined(works))
        except Exception as error:  # noqa: BLE001 - what one call's rows did must not reach the others: run each alone
            _log.warning("a joined run of %d calls failed (%r): running each alone", len(works), error)
    results: list[Rows | SymbiosisError] = []
    for work in works:
        try:
            results.append(_alone(work))
        except Exception as error:  # noqa: BLE001 - reported to its tenant, by name
            results.append(LayerFailed(f"{work.layers[0].spec.paths[0]} failed: {type(error).__name__}: {error}"))
    return results


class SlicedBatch:
    """A batch that is computed piece by piece: no row depends on another. Plain reference: `run_batch`."""

    def __init__(self, calls: Sequence[Call], begun: float) -> None:
        self.calls, self.begun = calls, begun
        self.seconds = 0.0
        """What its pieces have taken so far."""
        self._works = [call.work for call in calls]
        self._left = sum(call.pending.rows for call in calls)
        self._rows: Rows | None = None
        self._parts: list[Rows] = []

    def is_done(self) -> bool:
        return self._left == 0

    @torch.no_grad()
    def advance(self, most: int) -> int:
        """Compute a piece of at most so many rows, and no smaller than the others will be. How many it had."""
        first, pieces = self._works[0], -(-self._left // most)
        count = -(-self._left // pieces)
        try:
            rows = _join(self._works) if self._rows is None else self._rows
            self._parts.append(run(first.layers, first.key.direction, tuple(part[:count] for part in rows)))
            self._rows = tuple(part[count:] for part in rows)
            self._left -= count
        except Exception as error:  # noqa: BLE001 - told to its tenant when all of it has failed
            _log.warning("a piece of %d calls failed (%r): running each alone", len(self.calls), error)
            self._left, self._parts = 0, []
        return count

    def results(self) -> list[Rows | SymbiosisError]:
        """The result of each call, in order, as of `run_batch`."""
        if not self._parts:
            return run_batch(self.calls)
        try:
            joined = tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._parts, strict=True))
            return list(_split(self._works, joined))
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("the pieces of %d calls could not be joined (%r): running each alone", len(self.calls), error)
            self._parts = []
            return run_batch(self.calls)


def _alone(work: BatchCall) -> Rows:
    if work.places is not None:
        return run(work.layers, work.key.direction, work.rows, work.places)
    rows = tuple(_ready(part, work.layers[0], index) for index, part in enumerate(work.rows))
    results = run(work.layers, work.key.direction, rows)
    return tuple(_give_back(result, work.rows[0]) for result in results)


def _joined(works: Sequence[BatchCall]) -> list[Rows]:
    first = works[0]
    results = _split(works, run(first.layers, first.key.direction, _join(works)))
    if all(work.places is not None for work in works):
        places = [work.places or () for work in works]
        torch._foreach_copy_([p for each in places for p in each], [part for parts in results for part in parts])
        return places
    return results


def _join(works: Sequence[BatchCall]) -> Rows:
    """The rows of all calls below each other."""
    layer, parted = works[0].layers[0], zip(*(work.rows for work in works), strict=True)
    columns = [[_ready(part, layer, index) for part in parts] for index, parts in enumerate(parted)]
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns)


def _split(works: Sequence[BatchCall], results: Rows) -> list[Rows]:
    """Each call's own results."""
    sizes = [work.rows[0].shape[0] for work in works]
    split = zip(*(torch.split(result, sizes) for result in results), strict=True)
    return [tuple(_give_back(part, work.rows[0]) for part in parts) for work, parts in zip(works, split, strict=True)]


def _ready(rows: Tensor, layer: BaseLayer, index: int) -> Tensor:
    """Rows on the layer's device and (if floating) in the dtype it takes."""
    return rows.to(layer.device, layer.takes(index) if rows.is_floating_point() else None)


def _give_back(result: Tensor, rows: Tensor) -> Tensor:
    """A call's own result, in the dtype and on the device it came; perhaps a view of the whole batch's."""
    return result.to(rows.device, rows.dtype if rows.is_floating_point() else None)
