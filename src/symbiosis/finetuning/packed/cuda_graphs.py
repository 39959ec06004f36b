"""Training passes as CUDA graphs: one launch instead of some thousands, for passes that differ in numbers only.

A pass of a frequent key (`FrequencyGraphCache`) is captured. Its batch becomes the frame into which later batches of
that key are copied. A pass that computes by the lengths of its sequences cannot be captured. A graph runs on the
multiprocessors of the stream it was captured on, so each stream has graphs of its own. Gradients are written to where
each batch's tables point, outside of the graph's memory. A capture takes about as long as a pass.

All graphs of a stream and the eager passes between them share one memory pool, since one of them runs at a time. The
pool is as large as the largest pass needs. A larger pass starts a new pool: the old one is split into parts too small.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from symbiosis.finetuning.packed.batch import PackedBatch
from symbiosis.gpu.cuda_graph import capture
from symbiosis.gpu.driver import synchronized
from symbiosis.gpu.graph_cache import FrequencyGraphCache

_log = logging.getLogger("symbiosis")
_MAX_STREAMS = 2  # of all multiprocessors, and of a part of them
_MAX_FAILURES = 3  # captures in a row, after which no more are tried

Run: TypeAlias = Callable[[PackedBatch], Tensor]
"""Computes a pass: returns its losses, and its backward pass has written the gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    frame: PackedBatch
    losses_N: Tensor
    pool: torch.cuda.MemPool
    """Last field: freed after the graph."""


class _StreamGraphs:
    """Graphs of one stream, and their memory."""

    def __init__(self, capacity: int) -> None:
        self.graphs: FrequencyGraphCache[Any, _Graph] = FrequencyGraphCache(capacity)
        self.pool = torch.cuda.MemPool()
        self.max_rows = 0
        """Rows of the largest captured pass."""

    def reset(self) -> None:
        """Drop the graphs and their memory. The device must be idle."""
        self.graphs.clear()
        self.pool = torch.cuda.MemPool()
        self.max_rows = 0


class PassGraphs:
    """Used by one thread. The next pass of a stream overwrites the losses of the last one."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity` graphs are stored for each of the two streams used last."""
        self._capacity, self._device = capacity, device
        self._streams: OrderedDict[int, _StreamGraphs] = OrderedDict()
        self.is_new = False
        """The last pass was captured, or may soon be: later passes of its key are faster."""
        self._spare: torch.cuda.Stream | None = None
        self._failures = 0
        self._shares_pool = True
        """Eager passes allocate from the graphs' pool."""
        self._max_rows = self._max_length = 0
        """Of eager passes so far. A model that stores something for later passes stores more for a larger one."""

    def run(self, pack: PackedBatch, run: Run) -> Tensor:
        own, key = self._of_stream(), pack.key
        found = own.graphs.get(key)
        can_capture = self._failures < _MAX_FAILURES
        self.is_new = found is None and can_capture and own.graphs.may_admit(key)
        if found is None:
            if not (can_capture and own.graphs.admits(key)):
                return self._run_eager(pack, run, own)
            found = self._capture(pack, run, own)
            own.graphs.put(key, found)
            if found is None:
                with synchronized(self._device):
                    own.reset()  # its pool may be unusable
                return run(pack)
        else:
            for old, new in zip(found.frame.tensors, pack.tensors, strict=True):
                old.copy_(new)
        found.graph.replay()
        return found.losses_N

    def clear(self) -> None:
        """Drop all graphs; frequent passes are captured again."""
        with synchronized(self._device):
            self._streams.clear()

    def _of_stream(self) -> _StreamGraphs:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream not in self._streams:
            while len(self._streams) >= _MAX_STREAMS:  # of a GPU partition that is no longer used
                with synchronized(self._device):
                    self._streams.popitem(last=False)
            self._streams[stream] = _StreamGraphs(self._capacity)
        self._streams.move_to_end(stream)
        return self._streams[stream]

    def _run_eager(self, pack: PackedBatch, run: Run, own: _StreamGraphs) -> Tensor:
        """Compute a pass without a graph, in the memory of the graphs."""

        def compute() -> Tensor:
            frame = pack.frame()  # frees what the pass caches when it ends
            losses_N = run(frame)
            if frame.by_lengths:
                own.graphs.put(pack.key, None)
            return losses_N

        if not (own.graphs and self._shares_pool):
            return compute()
        is_larger = pack.rows > self._max_rows or pack.longest > self._max_length
        self._max_rows, self._max_length = max(self._max_rows, pack.rows), max(self._max_length, pack.longest)
        before = _allocated_bytes(own.pool) if is_larger else 0
        losses_N = None
        try:
            with self._on_capture_stream():
                with torch.cuda.use_mem_pool(own.pool, self._device):
                    found_N = compute()
                losses_N = found_N.clone()
            del found_N
        except torch.OutOfMemoryError:
            pass  # inside a pool, torch does not free cached memory of others
        if losses_N is None:  # not above: the exception holds the tensors of the pass
            with synchronized(self._device):
                torch.cuda.empty_cache()
            return compute()
        if is_larger and _has_grown(own.pool, before):  # graphs would overwrite what the model stores for later passes
            _log.warning("the model stores results of training passes: passes without a graph get memory of their own now")
            self._shares_pool = False
            self.clear()
        return losses_N

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        """A pool's memory belongs to the stream that the graphs were captured on."""
        here, there = torch.cuda.current_stream(self._device), self._capture_stream()
        there.wait_stream(here)
        try:
            with torch.cuda.stream(there):
                yield
        finally:  # also after an error: launched kernels write to memory that is reused next
            here.wait_stream(there)

    def _capture_stream(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):  # the default stream cannot be captured
            stream = self._spare = self._spare or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def _capture(self, pack: PackedBatch, run: Run, own: _StreamGraphs) -> _Graph | None:
        stream = self._capture_stream()
        with synchronized(self._device):
            if pack.rows > own.max_rows:
                own.reset()
            torch.cuda.empty_cache()  # cached memory of eager passes is not needed besides the graph's own
        frame = pack.frame()
        try:
            with torch.cuda.stream(stream):
                graph, losses_N = capture(lambda: run(frame), own.pool.id)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failures += 1
            last = "; no more are tried" if self._failures == _MAX_FAILURES else ""
            _log.warning("a training pass cannot be captured as a CUDA graph%s: %s", last, error)
            return None
        finally:
            stream.synchronize()
        self._failures, own.max_rows = 0, max(own.max_rows, pack.rows)
        return None if frame.by_lengths else _Graph(graph, frame, losses_N, own.pool)


def _has_grown(pool: torch.cuda.MemPool, before: int) -> bool:
    if _allocated_bytes(pool) <= before:
        return False
    gc.collect()  # unreachable tensors do not count
    return _allocated_bytes(pool) > before


def _allocated_bytes(pool: torch.cuda.MemPool) -> int:
    return sum(segment["allocated_size"] for segment in pool.snapshot())  # type: ignore[no-untyped-call]
