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
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from symbiosis.executor.layers import Rows, run
from symbiosis.executor.policies import BatchKey
from symbiosis.executor.runner import Work

_KNOWN = 4  # what comes so often comes again
_ROWS = 256  # of one call: with more rows the GPU takes longer than the launches
_SIZES = (16, 64, 128, 256, 512)  # of rows together
_LAYERS = 4  # of one call: q, k and v, or gate and up
_MOST, _MOST_OF_ONE = 8192, 1024  # graphs of everybody together, and of one tenant
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class _Joint:
    """All calls of one key that fit one size."""

    replay: Callable[[], None]
    rows: Rows
    results: Rows


class Replays:
    """For works with places, on one stream: its graphs share the memory between their kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.captures = 0
        """Graphs made so far: whoever times a batch leaves those out."""
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._works: dict[str, WeakSet[Work]] = {}  # by tenant; they go with their channels
        self._joints: dict[tuple[BatchKey, int], _Joint] = {}
        self._seen: dict[tuple[BatchKey, int], int] = {}
        self._memory: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self._parts: dict[tuple[int, int, int], Tensor] = {}

    def run(self, works: Sequence[tuple[str, Work, Rows]]) -> list[Rows] | None:
        """The results of a batch, (tenant, work, its places) each, if it is known well enough; None: run it as it is."""
        if len(works[0][1].layers) > _LAYERS:
            return None
        if len(works) == 1:
            return self._alone(*works[0])
        rows = sum(work.rows[0].shape[0] for _, work, _ in works)
        size = next((size for size in _SIZES if size >= rows), None)
        return None if size is None else self._together(works, size)

    def _alone(self, tenant: str, work: Work, places: Rows) -> list[Rows] | None:
        if work.replay is None:
            work.runs += 1
            if work.runs != _KNOWN or work.rows[0].shape[0] > _ROWS:
                return None
            kept = self._works.pop(tenant, None) or WeakSet()
            _drop_oldest(self._works, _MOST_OF_ONE)  # tenants without a token can have as many names as they like
            self._works[tenant] = kept
            if len(kept) >= _MOST_OF_ONE:
                return None
            work.replay = self._record(work, work.rows, places)
            if work.replay is None:
                return None
            kept.add(work)
        work.replay()
        return [places]

    def _together(self, works: Sequence[tuple[str, Work, Rows]], size: int) -> list[Rows] | None:
        _, first, first_places = works[0]
        joint = self._joints.get((first.key, size))
        if joint is None:
            if not self._is_known((first.key, size)):
                return None
            rows = tuple(self._take(f"row {i}", size, t) for i, t in enumerate(first.rows))
            results = tuple(self._take(f"result {i}", size, t) for i, t in enumerate(first_places))
            replay = self._record(first, rows, results)
            if replay is None:
                return None
            del self._seen[first.key, size]  # if it is dropped one day, it is counted from the beginning
            _drop_oldest(self._joints, _MOST)
            joint = self._joints[first.key, size] = _Joint(replay, rows, results)
        given: list[Tensor] = []
        starts: list[Tensor] = []
        ends: list[Tensor] = []
        wanted: list[Tensor] = []
        at = 0
        for _, work, places in works:
            end = at + work.rows[0].shape[0]
            given += work.rows
            starts += [self._part(memory, at, end) for memory in joint.rows]
            ends += [self._part(memory, at, end) for memory in joint.results]
            wanted += places
            at = end
        torch._foreach_copy_(starts, given)
        joint.replay()
        torch._foreach_copy_(wanted, ends)
        return [places for _, _, places in works]

    def _is_known(self, key: tuple[BatchKey, int]) -> bool:
        """Whether this has come often enough to be kept."""
        count = self._seen.pop(key, 0) + 1
        _drop_oldest(self._seen, _MOST)
        self._seen[key] = count
        return count == _KNOWN

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
        self.captures += 1
        try:
            if self._keeper is None:
                # A pool lives as long as a graph that uses it. This one stays when all tenants have left.
                self._pool, spare = torch.cuda.graph_pool_handle(), torch.zeros(8, device=self._device)
                self._keeper = self._capture(lambda: spare.add_(1.0))
            graph = self._capture(compute)
        except Exception as error:  # noqa: BLE001 - run as it is, whatever it did in there is told to its tenant then
            _log.warning("%s cannot be a CUDA graph (%r): it is run as it is", work.layers[0].spec.paths[0], error)
            self._keeper = None  # a failed capture may leave its pool unusable: the next one gets another
            return None
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, compute: Callable[[], Any]) -> torch.cuda.CUDAGraph:
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
        finally:
            if collects:
                gc.enable()
        return graph


def _drop_oldest(kept: dict[Any, Any], most: int) -> None:
    while len(kept) >= most:
        del kept[next(iter(kept))]
