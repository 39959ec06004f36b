"""Passes as CUDA graphs: one launch instead of some thousands, for passes that differ in numbers only.

A pass of a key that comes often (`favourites`) is captured; its pack becomes the frame into which later packs of that key
are copied. What is computed by the lengths of its sequences cannot be one. A graph runs on the multiprocessors of the
stream it was captured on, so each stream has graphs of its own. Gradients go to where each pack's tables say, which is
memory of its own. Capturing takes about as long as a pass; what cannot be captured runs as it always did.

All graphs of a stream, and the passes between them that are none, have the same memory, for only one of them runs at a
time: as much as the largest needs. One that is larger than those before starts anew, since its parts would not fit
into what theirs left.
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
from symbiosis.finetuning.packed.graph_admission import GraphAdmission
from symbiosis.gpu.cuda_graph import captured
from symbiosis.gpu.driver import done_on

_log = logging.getLogger("symbiosis")
_STREAMS = 2  # on all multiprocessors, and on a part of them
_FAILURES = 3  # captures in a row, after which no more are tried

Run: TypeAlias = Callable[[PackedBatch], Tensor]
"""Computes a pass: returns its losses, and its backward has written the gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    frame: PackedBatch
    losses_N: Tensor
    pool: torch.cuda.MemPool
    """Goes last."""


class _Kept:
    """Graphs of one stream, and their memory."""

    def __init__(self, most: int) -> None:
        self.graphs: dict[Any, _Graph] = {}
        self.favourites = GraphAdmission(most)
        self.pool = torch.cuda.MemPool()
        self.rows = 0
        """Of the largest."""

    def begin_anew(self) -> None:
        """With another memory, and without graphs. Nothing may be running."""
        self.graphs.clear()
        self.favourites.keep_none()
        self.pool = torch.cuda.MemPool()
        self.rows = 0


class PassGraphs:
    """One thread. The next pass of a stream writes over what the last one gave."""

    def __init__(self, most: int, device: torch.device) -> None:
        """At most so many graphs are kept of each stream, and those of two streams."""
        self._most, self._device = most, device
        self._streams: OrderedDict[int, _Kept] = OrderedDict()
        self.is_new = False
        """The last pass was one of a key that may soon be a graph, or became one: the next will be faster."""
        self._spare: torch.cuda.Stream | None = None
        self._failures = 0
        self._shares = True
        """Passes that are no graphs have the graphs' memory."""
        self._rows = self._longest = 0
        """Of such passes so far. A model that keeps something for later ones keeps more for one that is larger."""

    def run(self, pack: PackedBatch, run: Run) -> Tensor:
        kept, key = self._kept(), pack.key
        kept.favourites.came(key)
        found = kept.graphs.get(key)
        tries = self._failures < _FAILURES
        self.is_new = found is None and tries and kept.favourites.is_coming(key)
        if found is None:
            if not (tries and kept.favourites.is_worth(key)):
                return self._launched(pack, run, kept)
            found = self._captured(pack, run, kept)
            if found is None:
                kept.favourites.refuse(key)
                with done_on(self._device):
                    kept.begin_anew()  # that memory may be unusable
                return run(pack)
            kept.graphs.pop(kept.favourites.keep(key), None)
            kept.graphs[key] = found
        else:
            for old, new in zip(found.frame.tensors, pack.tensors, strict=True):
                old.copy_(new)
        found.graph.replay()
        return found.losses_N

    def clear(self) -> None:
        """Let go of all graphs; what comes often is captured again."""
        with done_on(self._device):
            self._streams.clear()

    def _kept(self) -> _Kept:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream not in self._streams:
            while len(self._streams) >= _STREAMS:  # a part that is no longer used
                with done_on(self._device):
                    self._streams.popitem(last=False)
            self._streams[stream] = _Kept(self._most)
        self._streams.move_to_end(stream)
        return self._streams[stream]

    def _launched(self, pack: PackedBatch, run: Run, kept: _Kept) -> Tensor:
        """A pass that is no graph, in the memory of those there are."""

        def computed() -> Tensor:
            frame = pack.frame()  # what it works out on the way goes with it
            losses_N = run(frame)
            if frame.by_lengths:
                kept.favourites.refuse(pack.key)
            return losses_N

        if not (kept.graphs and self._shares):
            return computed()
        is_larger = pack.rows > self._rows or pack.longest > self._longest
        self._rows, self._longest = max(self._rows, pack.rows), max(self._longest, pack.longest)
        before = _held(kept.pool) if is_larger else 0
        losses_N = None
        try:
            with self._where_graphs_are():
                with torch.cuda.use_mem_pool(kept.pool, self._device):
                    found_N = computed()
                losses_N = found_N.clone()
            del found_N
        except torch.OutOfMemoryError:
            pass  # in there, torch does not look for what could be given back elsewhere
        if losses_N is None:  # not above: the error holds what the pass had
            with done_on(self._device):
                torch.cuda.empty_cache()
            return computed()
        if is_larger and _holds_more(kept.pool, before):  # graphs would write over what the model has kept for later passes
            _log.warning("the model keeps what training passes compute: those that are no graphs get memory of their own now")
            self._shares = False
            self.clear()
        return losses_N

    @contextmanager
    def _where_graphs_are(self) -> Iterator[None]:
        """On the stream that they were captured on: memory belongs to a stream."""
        here, there = torch.cuda.current_stream(self._device), self._capturing_stream()
        there.wait_stream(here)
        try:
            with torch.cuda.stream(there):
                yield
        finally:  # whatever it raises: what was launched writes to memory that is another's after it
            here.wait_stream(there)

    def _capturing_stream(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):  # nothing can be captured there
            stream = self._spare = self._spare or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def _captured(self, pack: PackedBatch, run: Run, kept: _Kept) -> _Graph | None:
        stream = self._capturing_stream()
        with done_on(self._device):
            if pack.rows > kept.rows:
                kept.begin_anew()
            torch.cuda.empty_cache()  # what passes had is not needed beside the graph's own
        frame = pack.frame()
        try:
            with torch.cuda.stream(stream):
                graph, losses_N = captured(lambda: run(frame), kept.pool.id)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failures += 1
            last = "; no more are tried" if self._failures == _FAILURES else ""
            _log.warning("a training pass cannot be a CUDA graph%s: %s", last, error)
            return None
        finally:
            stream.synchronize()
        self._failures, kept.rows = 0, max(kept.rows, pack.rows)
        return None if frame.by_lengths else _Graph(graph, frame, losses_N, kept.pool)


def _holds_more(pool: torch.cuda.MemPool, before: int) -> bool:
    if _held(pool) <= before:
        return False
    gc.collect()  # what nobody can reach is not kept
    return _held(pool) > before


def _held(pool: torch.cuda.MemPool) -> int:
    """Bytes that somebody has of it."""
    return sum(segment["allocated_size"] for segment in pool.snapshot())  # type: ignore[no-untyped-call]
