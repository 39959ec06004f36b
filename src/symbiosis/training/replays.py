"""Passes as CUDA graphs: one launch instead of some thousands, for passes that differ in numbers only.

A pass of a key that comes often (`favourites`) is captured; its pack becomes the frame into which later packs of that key
are copied. What is computed by the lengths of its sequences cannot be one. A graph runs on the multiprocessors of the
stream it was captured on, so each stream has graphs of its own. Gradients go to where each pack's tables say, which is
memory of its own. Capturing takes about as long as a pass; what cannot be captured runs as it always did.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from symbiosis.executor.capture import captured
from symbiosis.links.driver import done_on
from symbiosis.training.favourites import Favourites
from symbiosis.training.pack import Pack

_log = logging.getLogger("symbiosis")
_STREAMS = 2  # on all multiprocessors, and on a part of them
_FAILURES = 3  # captures in a row, after which no more are tried

Run: TypeAlias = Callable[[Pack], Tensor]
"""Computes a pass: returns its losses, and its backward has written the gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    frame: Pack
    losses_N: Tensor


class _Kept:
    """Graphs of one stream, and their memory."""

    def __init__(self, most: int) -> None:
        self.graphs: dict[Any, _Graph] = {}
        self.favourites = Favourites(most)
        self.pool = torch.cuda.graph_pool_handle()


class Replays:
    """One thread. All graphs of a stream share memory: the next replay writes over what the last one gave."""

    def __init__(self, most: int, device: torch.device) -> None:
        """At most so many graphs are kept of each stream, and those of two streams."""
        self._most, self._device = most, device
        self._streams: OrderedDict[int, _Kept] = OrderedDict()
        self.is_new = False
        """The last pass was one of a key that may soon be a graph, or became one: the next will be faster."""
        self._spare: torch.cuda.Stream | None = None
        self._failures = 0

    def run(self, pack: Pack, run: Run) -> Tensor:
        kept, key = self._kept(), pack.key
        kept.favourites.came(key)
        found = kept.graphs.get(key)
        tries = self._failures < _FAILURES
        self.is_new = found is None and tries and kept.favourites.is_coming(key)
        if found is None:
            if not (tries and kept.favourites.is_worth(key)):
                losses_N = run(pack)
                if pack.by_lengths:
                    kept.favourites.refuse(key)
                return losses_N
            found = self._captured(pack, run, kept.pool)
            if found is None:
                kept.favourites.refuse(key)
                kept.pool = torch.cuda.graph_pool_handle()  # that one may be unusable
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

    def _captured(self, pack: Pack, run: Run, pool: Any) -> _Graph | None:
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):  # nothing can be captured there
            stream = self._spare = self._spare or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with done_on(self._device):
            torch.cuda.empty_cache()  # what passes had is not needed beside the graph's own
        frame = pack.frame()
        try:
            with torch.cuda.stream(stream):
                graph, losses_N = captured(lambda: run(frame), pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failures += 1
            last = "; no more are tried" if self._failures == _FAILURES else ""
            _log.warning("a training pass cannot be a CUDA graph%s: %s", last, error)
            return None
        finally:
            stream.synchronize()
        self._failures = 0
        return None if frame.by_lengths else _Graph(graph, frame, losses_N)
