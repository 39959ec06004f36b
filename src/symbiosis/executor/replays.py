"""Small calls that come again and again, as CUDA graphs: one launch instead of one for every kernel.

A decoding tenant says the same words from the same memory for every token,
and what its call costs is launching it. Plain reference: `layers.run`.
"""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from weakref import WeakSet

import torch

from symbiosis.executor.layers import Rows, run
from symbiosis.executor.runner import Work

_KNOWN = 4  # a call that comes so often comes again
_ROWS = 256  # with more rows the GPU takes longer than the launches
_MOST = 8192
_log = logging.getLogger("symbiosis")


class Replays:
    """For works with places, on one stream: the graphs share the memory between their kernels."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._works: WeakSet[Work] = WeakSet()  # they go with their channels

    def knows(self, work: Work) -> bool:
        """Whether this work can be replayed; the first times it is only counted."""
        if work.graph is not None:
            return True
        work.runs += 1
        if work.runs != _KNOWN or len(self._works) >= _MOST or work.rows[0].shape[0] > _ROWS:
            return False
        try:
            work.graph = self._capture(work)
            self._works.add(work)
        except RuntimeError as error:
            _log.warning("%s cannot be a CUDA graph (%r): it is run as it is", work.layers[0].spec.paths[0], error)
        return work.graph is not None

    @torch.no_grad()
    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # nothing on the GPU may be freed meanwhile
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run(work.layers, work.key.direction, work.rows, work.places)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph

    def replay(self, work: Work) -> Rows:
        assert work.graph is not None, "asked before"
        assert work.places is not None, "only such works are captured"
        work.graph.replay()
        return work.places
