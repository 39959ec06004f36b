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
from symbiosis.executor.layers import BaseLayer, Rows, run
from symbiosis.executor.policies import BatchKey, Pending
from symbiosis.executor.sessions import Session

_log = logging.getLogger("symbiosis")


@dataclass(slots=True, weakref_slot=True, eq=False)
class Work:
    """What a call asks for, checked: the same as often as the same words come from the same memory."""

    layers: tuple[BaseLayer, ...]
    key: BatchKey
    rows: Rows
    places: Rows | None
    """Where the results may be computed in place, on the layers' device and in their dtype."""
    bytes: int
    runs: int = 0
    """How often it ran so far, and"""
    replay: Callable[[], object] | None = None
    """what runs it again, if it came often enough (`replays`)."""
    number: int = field(default_factory=itertools.count().__next__)
    """No other work ever has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A checked layer call, from the queue to the answer."""

    pending: Pending
    session: Session
    request: int
    work: Work


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


def _alone(work: Work) -> Rows:
    if work.places is not None:
        return run(work.layers, work.key.direction, work.rows, work.places)
    rows = tuple(_ready(part, work.layers[0]) for part in work.rows)
    results = run(work.layers, work.key.direction, rows)
    return tuple(_give_back(result, work.rows[0]) for result in results)


def _joined(works: Sequence[Work]) -> list[Rows]:
    first = works[0]
    columns = zip(*(work.rows for work in works), strict=True)
    joined = tuple(torch.cat([_ready(part, first.layers[0]) for part in parts]) for parts in columns)
    results = run(first.layers, first.key.direction, joined)
    sizes = [work.rows[0].shape[0] for work in works]
    split = list(zip(*(torch.split(result, sizes) for result in results), strict=True))
    if all(work.places is not None for work in works):
        places = [work.places or () for work in works]
        torch._foreach_copy_([p for each in places for p in each], [part for parts in split for part in parts])
        return places
    return [tuple(_give_back(part, work.rows[0]) for part in parts) for work, parts in zip(works, split, strict=True)]


def _ready(rows: Tensor, layer: BaseLayer) -> Tensor:
    """Rows on the layer's device and (if floating) in its dtype."""
    return rows.to(layer.device, layer.dtype if rows.is_floating_point() else None)


def _give_back(result: Tensor, rows: Tensor) -> Tensor:
    """A call's own result, in the dtype and on the device it came; perhaps a view of the whole batch's."""
    return result.to(rows.device, rows.dtype if rows.is_floating_point() else None)
