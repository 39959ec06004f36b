"""Small calls that come again and again, as CUDA graphs: one launch instead of one for every kernel.

A decoding tenant says the same words from the same memory for every token,
and what its call costs is launching it. Calls of several tenants to the same
layers are copied below each other into memory of a fixed size, run as one
graph, and copied out again; rows that are left over there from before are
computed too, and nobody gets them. Plain reference: `runner.run_batch`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from symbiosis.executor.layers import Rows, run
from symbiosis.executor.policies import BatchKey
from symbiosis.executor.runner import Work

_KNOWN = 4  # what comes so often comes again
_ROWS = 256  # of one call: with more rows the GPU takes longer than the launches
_SIZES = (16, 64, 128, 256, 512)  # of rows together
_MOST = 8192
_log = logging.getLogger("symbiosis")


@dataclass(slots=True)
class _Joint:
    """All calls of one key that fit one size."""

    runs: int = 0
    replay: Callable[[], None] | None = None
    rows: Rows = ()
    results: Rows = ()


class Replays:
    """For works with places, on one stream: its graphs share the memory between their kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._works: WeakSet[Work] = WeakSet()  # they go with their channels
        self._joints: dict[tuple[BatchKey, int], _Joint] = {}
        self._memory: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self._parts: dict[tuple[int, int, int], Tensor] = {}

    def run(self, works: Sequence[Work]) -> list[Rows] | None:
        """The results of a batch, if it is known well enough; None if it must be run as it is."""
        if len(works) == 1:
            return self._alone(works[0])
        rows = sum(work.rows[0].shape[0] for work in works)
        size = next((size for size in _SIZES if size >= rows), None)
        return None if size is None else self._together(works, size)

    def _alone(self, work: Work) -> list[Rows] | None:
        if work.replay is None:
            work.runs += 1
            if work.runs != _KNOWN or len(self._works) >= _MOST or work.rows[0].shape[0] > _ROWS:
                return None
            assert work.places is not None, "only such works come here"
            work.replay = self._record(work, work.rows, work.places)
            if work.replay is None:
                return None
            self._works.add(work)
        work.replay()
        return [work.places or ()]

    def _together(self, works: Sequence[Work], size: int) -> list[Rows] | None:
        first = works[0]
        if (first.key, size) not in self._joints and len(self._joints) >= _MOST:
            return None
        joint = self._joints.setdefault((first.key, size), _Joint())
        if joint.replay is None:
            joint.runs += 1
            if joint.runs != _KNOWN:
                return None
            assert first.places is not None, "only such works come here"
            joint.rows = tuple(self._take(f"row {i}", size, t) for i, t in enumerate(first.rows))
            joint.results = tuple(self._take(f"result {i}", size, t) for i, t in enumerate(first.places))
            joint.replay = self._record(first, joint.rows, joint.results)
            if joint.replay is None:
                return None
        ends: list[Tensor] = []
        starts: list[Tensor] = []
        places: list[Tensor] = []
        given: list[Tensor] = []
        at = 0
        for work in works:
            end = at + work.rows[0].shape[0]
            given += work.rows
            starts += [self._part(memory, at, end) for memory in joint.rows]
            ends += [self._part(memory, at, end) for memory in joint.results]
            places += work.places or ()
            at = end
        torch._foreach_copy_(starts, given)
        joint.replay()
        torch._foreach_copy_(places, ends)
        return [work.places or () for work in works]

    def _take(self, use: str, size: int, like: Tensor) -> Tensor:
        """Memory that all joints of this size and width use in turn."""
        key = (use, size, like.shape[1], like.dtype)
        if key not in self._memory:
            self._memory[key] = torch.zeros(size, like.shape[1], dtype=like.dtype, device=like.device)
        return self._memory[key]

    def _part(self, memory: Tensor, start: int, end: int) -> Tensor:
        key = (id(memory), start, end)  # the memory is never let go
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= _MOST:
                self._parts.clear()
            part = self._parts[key] = memory[start:end]
        return part

    def _record(self, work: Work, rows: Rows, results: Rows) -> Callable[[], None] | None:
        """What runs these layers from here to there."""

        @torch.no_grad()
        def compute() -> None:
            run(work.layers, work.key.direction, rows, results)

        if self._device.type != "cuda":
            return compute
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # nothing on the GPU may be freed meanwhile
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:
            _log.warning("%s cannot be a CUDA graph (%r): it is run as it is", work.layers[0].spec.paths[0], error)
            return None
        finally:
            if collects:
                gc.enable()
        replay: Callable[[], None] = graph.replay
        return replay
