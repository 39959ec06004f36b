"""CUDA streams of the executor's GPU: a long training batch does not delay decoding.

The GPU runs kernels of the high-priority stream first, whatever was launched before on the low-priority one. Only
batches whose rows and results lie in GPU channels use these streams: their clients wait for a counter, not for a
stream. Other batches use the default stream, as tenants in this process do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from symbiosis.common.cost_model import CostModel
from symbiosis.errors import SymbiosisError
from symbiosis.gpu import driver
from symbiosis.split.executor.batch import Call, run_batch
from symbiosis.split.executor.cuda_graphs import BatchGraphs
from symbiosis.split.executor.layers import Rows
from symbiosis.split.executor.sessions import BatchKey

_TIME_EVERY = 32  # batches: an event is cheap, not free
_MAX_PENDING_TIMINGS = 8
_CONTEXT_SWITCH_S = 3e-4  # measured: to the other process's context and back
_log = logging.getLogger("symbiosis")


class StreamSelector:
    """Selects the stream of each batch of the executor's one thread, and times some batches."""

    def __init__(self, device: torch.device) -> None:
        low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self._default = torch.cuda.default_stream(device)
        self._training = torch.cuda.Stream(device, priority=low)  # type: ignore[no-untyped-call]
        self._inference = torch.cuda.Stream(device, priority=high)  # type: ignore[no-untyped-call]
        self._current = self._default
        self._graphs = BatchGraphs(device)
        self.context_switch_s = 0.0 if driver.is_shared(device) else _CONTEXT_SWITCH_S
        """GPU time that a call from another process costs besides its products."""
        self._batches = 0
        self._pending_timings: list[tuple[torch.cuda.Event, torch.cuda.Event, BatchKey, int]] = []

    def run(self, calls: Sequence[Call], costs: CostModel) -> list[Rows | SymbiosisError]:
        """Run a batch on its stream, which stays current until `leave`. `costs` observes some batches, later."""
        self._enter(calls)
        self._batches += 1
        if self._batches % _TIME_EVERY:
            return self._run(calls)
        self._collect_timings(costs)
        if len(self._pending_timings) >= _MAX_PENDING_TIMINGS:
            return self._run(calls)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        captures = self._graphs.captures
        started.record(self._current)
        results = self._run(calls)
        ended.record(self._current)
        if self._graphs.captures != captures:
            return results  # the capture took milliseconds, once
        self._pending_timings.append((started, ended, calls[0].pending.key, sum(call.pending.rows for call in calls)))
        return results

    def _run(self, calls: Sequence[Call]) -> list[Rows | SymbiosisError]:
        if self._current is self._inference:
            try:
                results = self._graphs.run([(call.session.tenant, call.work, call.work.places or ()) for call in calls])
            except Exception as error:  # noqa: BLE001 - run without graphs, each call gets its own error
                _log.warning("the replay of %d calls failed (%r): running them without a CUDA graph", len(calls), error)
                results = None
            if results is not None:
                return list(results)
        return run_batch(calls)

    def _enter(self, calls: Sequence[Call]) -> None:
        stream = self._default
        if all(call.work.places is not None for call in calls):
            stream = self._training if all(call.is_training for call in calls) else self._inference
        self._set_stream(stream)

    def _set_stream(self, stream: torch.cuda.Stream) -> None:
        if stream is not self._current:
            torch.cuda.set_stream(stream)
            self._current = stream

    @property
    def graphs(self) -> int:
        """CUDA graphs captured so far."""
        return self._graphs.captures

    def check(self) -> None:
        """Raise if the GPU's context is broken: it cannot be used again in this process."""
        self._current.synchronize()

    def leave(self) -> None:
        """Make the default stream current."""
        self._set_stream(self._default)

    def _collect_timings(self, costs: CostModel) -> None:
        pending = []
        for started, ended, key, rows in self._pending_timings:
            if ended.query():  # type: ignore[no-untyped-call]
                costs.observe(key.shape, rows, started.elapsed_time(ended) / 1e3)
            else:
                pending.append((started, ended, key, rows))
        self._pending_timings = pending
