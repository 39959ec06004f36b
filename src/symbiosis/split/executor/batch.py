"""Runs a batch: joins the rows of its calls, runs the layers once, splits the results.

Nothing outlives a batch. If a joined run fails, each call runs in a batch of its own, so that only the faulty call fails.
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
from symbiosis.split.executor.sessions import BatchKey, PendingCall, Session

_log = logging.getLogger("symbiosis")


@dataclass(slots=True, weakref_slot=True, eq=False)
class BatchCall:
    """The validated work of a call. Repeated calls from the same memory share one."""

    layers: tuple[BaseLayer, ...]
    key: BatchKey
    rows: Rows
    places: Rows | None  # where results may be computed in place, on the layers' device and in their dtype
    bytes: int  # that the queue holds for its rows
    # of `cuda_graphs`: recent runs in a row, the time of the last one, and the replay of the graph once captured
    runs: int = 0
    ran: float = 0.0
    replay: Callable[[], object] | None = None
    number: int = field(default_factory=itertools.count().__next__)  # unique in the process


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A validated call, from the queue to its reply."""

    pending: PendingCall
    session: Session
    request: int
    work: BatchCall

    @property
    def is_training(self) -> bool:
        """Whether the session trains. The first calls of a training step carry no gradient, and look like inference."""
        return self.pending.training or self.session.is_training


@torch.no_grad()
def run_batch(calls: Sequence[Call]) -> list[Rows | SymbiosisError]:
    """The result of each call, in order. The calls have equal batch keys."""
    works = [call.work for call in calls]
    if len(works) > 1:
        try:
            return list(_joined(works))
        except Exception as error:  # noqa: BLE001 - one call's rows must not fail the others: run each alone
            _log.warning("a batch of %d calls failed (%r): running each alone", len(works), error)
    results: list[Rows | SymbiosisError] = []
    for work in works:
        try:
            results.append(_alone(work))
        except Exception as error:  # noqa: BLE001 - sent to its tenant
            results.append(LayerFailed(f"{work.layers[0].spec.paths[0]} failed: {type(error).__name__}: {error}"))
    return results


class SlicedBatch:
    """A batch that runs in slices of rows: no row depends on another. Plain reference: `run_batch`."""

    def __init__(self, calls: Sequence[Call], started: float) -> None:
        self.calls, self.started = calls, started
        self.seconds = 0.0
        """Time of its slices so far."""
        self._works = [call.work for call in calls]
        self._rows_left = sum(call.pending.rows for call in calls)
        self._rows: Rows | None = None
        self._results: list[Rows] = []

    def is_done(self) -> bool:
        return self._rows_left == 0

    @torch.no_grad()
    def run_slice(self, max_rows: int) -> int:
        """Run a slice of at most `max_rows`; the slices left are of about equal size. Returns its number of rows."""
        first, slices = self._works[0], -(-self._rows_left // max_rows)
        count = -(-self._rows_left // slices)
        try:
            rows = _join(self._works) if self._rows is None else self._rows
            self._results.append(run(first.layers, first.key.direction, tuple(part[:count] for part in rows)))
            self._rows = tuple(part[count:] for part in rows)
            self._rows_left -= count
        except Exception as error:  # noqa: BLE001 - `results` runs each call alone
            _log.warning("a slice of %d calls failed (%r): running each alone", len(self.calls), error)
            self._rows_left, self._results = 0, []
        return count

    def results(self) -> list[Rows | SymbiosisError]:
        """The result of each call, in order, as of `run_batch`."""
        try:
            if self._results:
                return list(_split(self._works, _concatenate(self._results)))
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("the slices of %d calls could not be joined (%r): running each alone", len(self.calls), error)
            self._results = []
        return run_batch(self.calls)


def _alone(work: BatchCall) -> Rows:
    if work.places is not None:
        return run(work.layers, work.key.direction, work.rows, work.places)
    rows = tuple(_convert(part, work.layers[0], index) for index, part in enumerate(work.rows))
    results = run(work.layers, work.key.direction, rows)
    converted = tuple(_convert_back(result, work.rows[0]) for result in results)
    _wait_for_copies(work.layers[0].device, [converted])
    return converted


def _joined(works: Sequence[BatchCall]) -> list[Rows]:
    first = works[0]
    results = _split(works, run(first.layers, first.key.direction, _join(works)))
    if all(work.places is not None for work in works):
        places = [work.places or () for work in works]
        torch._foreach_copy_([p for each in places for p in each], [part for parts in results for part in parts])
        return places
    return results


def _join(works: Sequence[BatchCall]) -> Rows:
    """The rows of all calls, concatenated."""
    layer = works[0].layers[0]
    return _concatenate([tuple(_convert(part, layer, index) for index, part in enumerate(work.rows)) for work in works])


def _concatenate(parts: Sequence[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _split(works: Sequence[BatchCall], results: Rows) -> list[Rows]:
    """The results of each call."""
    sizes = [work.rows[0].shape[0] for work in works]
    split = zip(*(torch.split(result, sizes) for result in results), strict=True)
    converted = [tuple(_convert_back(part, work.rows[0]) for part in parts) for work, parts in zip(works, split, strict=True)]
    _wait_for_copies(works[0].layers[0].device, converted)
    return converted


def _convert(rows: Tensor, layer: BaseLayer, index: int) -> Tensor:
    """Rows on the layer's device and, if floating point, in the dtype of its input of this index."""
    return rows.to(layer.device, layer.input_dtype(index) if rows.is_floating_point() else None)


def _convert_back(result: Tensor, rows: Tensor) -> Tensor:
    """A result in the dtype and on the device of the call's rows; it may be a view of the batch's result.

    A copy from a GPU to the host is asynchronous, into page-locked memory: `_wait_for_copies` must follow.
    """
    if rows.is_floating_point():
        result = result.to(rows.dtype)
    return result.to(rows.device, non_blocking=result.is_cuda and rows.device.type == "cpu")


def _wait_for_copies(device: torch.device, results: Sequence[Rows]) -> None:
    """Wait once for all copies of a batch from a GPU to the host."""
    if device.type == "cuda" and any(part.device.type == "cpu" for parts in results for part in parts):
        torch.cuda.current_stream(device).synchronize()
