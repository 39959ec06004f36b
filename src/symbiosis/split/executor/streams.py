"""Lanes: streams on the executor's GPU, so that a long training batch does not stand in the way of decoding.

What the GPU has in hand of the urgent lane goes first, whatever was launched
on the calm one before. Only batches whose rows and results lie in channels of
their own travel in lanes: their neighbours wait for a counter, not for a
stream. Everything else stays on the usual stream, which tenants in this process use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from symbiosis.errors import SymbiosisError
from symbiosis.gpu import driver
from symbiosis.split.executor.batch import Call, run_batch
from symbiosis.split.executor.cost_model import CostModel
from symbiosis.split.executor.cuda_graphs import BatchGraphs
from symbiosis.split.executor.layers import Rows
from symbiosis.split.executor.sessions import BatchKey

_TIME_EVERY = 32  # batches: an event is cheap, not free
_AT_ONCE = 8  # events whose time has not come
_CHANGE_S = 3e-4  # measured: to the other process's context and back (docs/design.md)
_log = logging.getLogger("symbiosis")


class StreamSelector:
    """Chooses the stream for each batch of the executor's one thread, and times some of them."""

    def __init__(self, device: torch.device) -> None:
        low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self._usual = torch.cuda.default_stream(device)
        self._calm = torch.cuda.Stream(device, priority=low)  # type: ignore[no-untyped-call]
        self._urgent = torch.cuda.Stream(device, priority=high)  # type: ignore[no-untyped-call]
        self._now = self._usual
        self._replays = BatchGraphs(device)
        self.change_s = 0.0 if driver.is_shared(device) else _CHANGE_S
        """What a call from another process costs the GPU besides its products."""
        self._batches = 0
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event, BatchKey, int]] = []

    def run(self, calls: Sequence[Call], costs: CostModel) -> list[Rows | SymbiosisError]:
        """Run a batch in its lane; what it costs the GPU is noted later, now and then. Then answer, and `leave`."""
        self._enter(calls)
        self._batches += 1
        if self._batches % _TIME_EVERY:
            return self._run(calls)
        self._look(costs)
        if len(self._timed) >= _AT_ONCE:
            return self._run(calls)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        captures = self._replays.captures
        started.record(self._now)
        results = self._run(calls)
        ended.record(self._now)
        if self._replays.captures != captures:
            return results  # that took the host milliseconds, once
        self._timed.append((started, ended, calls[0].pending.key, sum(call.pending.rows for call in calls)))
        return results

    def _run(self, calls: Sequence[Call]) -> list[Rows | SymbiosisError]:
        if self._now is self._urgent:
            try:
                known = self._replays.run([(call.session.tenant, call.work, call.work.places or ()) for call in calls])
            except Exception as error:  # noqa: BLE001 - as they are, each gets its own error
                _log.warning("a replay of %d calls failed (%r): running them as they are", len(calls), error)
                known = None
            if known is not None:
                return list(known)
        return run_batch(calls)

    def _enter(self, calls: Sequence[Call]) -> None:
        lane = self._usual
        if all(call.work.places is not None for call in calls):
            lane = self._calm if all(call.is_training for call in calls) else self._urgent
        if lane is not self._now:
            torch.cuda.set_stream(lane)
            self._now = lane

    @property
    def graphs(self) -> int:
        """CUDA graphs made so far."""
        return self._replays.captures

    def check(self) -> None:
        """Raise if the GPU's context is broken: nothing on it works again in this process."""
        self._now.synchronize()

    def leave(self) -> None:
        if self._now is not self._usual:
            torch.cuda.set_stream(self._usual)
            self._now = self._usual

    def _look(self, costs: CostModel) -> None:
        waiting = []
        for started, ended, key, rows in self._timed:
            if ended.query():  # type: ignore[no-untyped-call]
                costs.observe(key.shape, rows, started.elapsed_time(ended) / 1e3)
            else:
                waiting.append((started, ended, key, rows))
        self._timed = waiting
