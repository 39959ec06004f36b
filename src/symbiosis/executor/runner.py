"""Runs a batch: joins the rows of its calls, runs the layers once, splits the result.

Nothing is kept. If a joined run fails, each call is run alone, so that only
the one at fault gets the error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.errors import LayerFailed, SymbiosisError
from symbiosis.executor.layers import BaseLayer, Rows, run
from symbiosis.executor.policies import Pending
from symbiosis.executor.sessions import Session
from symbiosis.messages import tensor_bytes
from symbiosis.types import Direction

_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A checked layer call with its rows, from the queue to the answer."""

    pending: Pending
    session: Session
    request: int
    layers: tuple[BaseLayer, ...]
    rows: Rows

    @property
    def direction(self) -> Direction:
        return self.pending.key.direction

    def bytes(self) -> int:
        return sum(tensor_bytes(rows) for rows in self.rows)


@torch.no_grad()
def run_batch(calls: Sequence[Call]) -> list[Rows | SymbiosisError]:
    """The result of each call, in order; the calls have equal batch keys."""
    if len(calls) > 1:
        try:
            return list(_joined(calls))
        except Exception as error:  # noqa: BLE001 - what one call's rows did must not reach the others: run each alone
            _log.warning("a joined run of %d calls failed (%r): running each alone", len(calls), error)
    results: list[Rows | SymbiosisError] = []
    for call in calls:
        try:
            results.extend(_joined([call]))
        except Exception as error:  # noqa: BLE001 - reported to its tenant, by name
            results.append(LayerFailed(f"{call.layers[0].spec.paths[0]} failed: {type(error).__name__}: {error}"))
    return results


def _joined(calls: Sequence[Call]) -> list[Rows]:
    first = calls[0]
    layer = first.layers[0]
    joined = tuple(_join([call.rows[i] for call in calls], layer) for i in range(len(first.rows)))
    results = run(first.layers, first.direction, joined)
    if len(calls) == 1:
        return [tuple(_give_back(result, first.rows[0]) for result in results)]
    split, at = [], 0
    for call in calls:
        end = at + call.pending.rows
        split.append(tuple(_give_back(result[at:end], call.rows[0]) for result in results))
        at = end
    return split


def _join(parts: list[Tensor], layer: BaseLayer) -> Tensor:
    """The rows of all calls below each other, on the layer's device and (if floating) in its dtype."""
    ready = [p.to(layer.device, layer.dtype if p.is_floating_point() else None) for p in parts]
    return ready[0] if len(ready) == 1 else torch.cat(ready)


def _give_back(result: Tensor, rows: Tensor) -> Tensor:
    """A call's own result, in the dtype and on the device it came; perhaps a view of the whole batch's."""
    return result.to(rows.device, rows.dtype if rows.is_floating_point() else None)
