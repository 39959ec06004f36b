"""Small calls that repeat, as CUDA graphs: one launch instead of one for every kernel.

A decoding tenant repeats the same call from the same memory for every token, and its cost is the launches. Three kinds
of graphs exist: of one call; of a number of rows, with copies in and out around the replay, for any set of calls; and
of a set of calls that repeats, copies included. Captures block the executor's one thread, so those of several calls
take a bounded share of the time. Plain reference: `batch.run_batch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from symbiosis.common.bounded_dict import evict_oldest
from symbiosis.gpu.cuda_graph import GraphPool
from symbiosis.gpu.graph_cache import GraphCache
from symbiosis.split.executor.batch import BatchCall
from symbiosis.split.executor.layers import Rows, run
from symbiosis.split.executor.sessions import BatchKey

_MIN_USES, _MIN_USES_OF_SET = 4, 64  # sets of calls change often; a graph by size serves them meanwhile
_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # rows
_MAX_ROWS, _MAX_ROWS_OF_SET = 256, 512  # with more rows the kernels take longer than their launches
_MAX_LAYERS = 4  # of one call: q, k and v, or gate and up
_MAX_GRAPHS, _MAX_GRAPHS_OF_TENANT = 8192, 1024
_MAX_COPIES = 2048  # sets of calls whose copies are cached
_log = logging.getLogger("symbiosis")

Replay: TypeAlias = Callable[[], object]
_Key = TypeVar("_Key", tuple[int, ...], tuple[BatchKey, int])
Member: TypeAlias = tuple[str, BatchCall, Rows]
"""Tenant, call, and where its results go."""


class BatchGraphs:
    """Graphs of calls whose results have places, on one stream. They share one memory pool."""

    def __init__(self, device: torch.device, capture_time_share: float = 0.1, max_gap_s: float = 0.5) -> None:
        """`capture_time_share` of the time may be spent on captures of several calls.

        Uses of one call count only within `max_gap_s` of each other: a prompt of the same length now and then is
        not worth a graph for each of its calls.
        """
        self._device, self._capture_time_share, self._max_gap_s = device, capture_time_share, max_gap_s
        self._next_capture_at = 0.0
        self.captures = 0
        """Graphs captured so far. Timings of a batch that captured are not representative."""
        self._pool = GraphPool(device)
        self._captured: dict[str, WeakSet[BatchCall]] = {}  # by tenant; a call lives as long as its channel
        self._copies: dict[tuple[int, ...], list[tuple[list[Tensor], list[Tensor]]]] = {}
        """Copies in and out by set of calls. Numbers of calls are never reused, so entries cannot become wrong."""
        self._by_set: GraphCache[tuple[int, ...], Replay] = GraphCache(_MAX_GRAPHS, _MIN_USES_OF_SET)
        self._by_size: GraphCache[tuple[BatchKey, int], Replay] = GraphCache(_MAX_GRAPHS, _MIN_USES)
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def run(self, members: Sequence[Member]) -> list[Rows] | None:
        """The results of a batch if graphs of it exist or are captured now; None otherwise."""
        if len(members[0][1].layers) > _MAX_LAYERS:
            return None
        if len(members) == 1:
            return self._run_one(*members[0])
        return self._run_set(members)

    def _run_one(self, tenant: str, call: BatchCall, places: Rows) -> list[Rows] | None:
        if call.replay is None:
            now = time.monotonic()
            call.runs = call.runs + 1 if now - call.ran < self._max_gap_s else 1
            call.ran = now
            if call.runs != _MIN_USES or call.rows[0].shape[0] > _MAX_ROWS:
                return None
            captured = self._captured.pop(tenant, None) or WeakSet()
            evict_oldest(self._captured, _MAX_GRAPHS_OF_TENANT)  # without auth tokens, tenants choose their names
            self._captured[tenant] = captured
            if len(captured) >= _MAX_GRAPHS_OF_TENANT:
                return None
            call.replay = self._record(call, partial(run, call.layers, call.key.direction, call.rows, places))
            if call.replay is None:
                return None
            captured.add(call)
        call.replay()
        return [places]

    def _run_set(self, members: Sequence[Member]) -> list[Rows] | None:
        numbers = tuple(sorted(call.number for _, call, _ in members))
        rows = sum(call.rows[0].shape[0] for _, call, _ in members)
        if rows > _MAX_ROWS_OF_SET:
            return None
        replay = self._by_set.get(numbers)
        if replay is None:
            if not (self._by_set.admits(numbers) and self._may_capture()):
                return self._run_by_size(numbers, members, rows)
            self._copies.pop(numbers, None)
            replay = self._capture(self._by_set, numbers, partial(self._record_set, members, rows))
            if replay is None:
                return None
        replay()
        return [places for _, _, places in members]

    def _run_by_size(self, numbers: tuple[int, ...], members: Sequence[Member], count: int) -> list[Rows] | None:
        """Replay the graph of the next size. Its spare rows hold stale numbers, which no call reads."""
        first = members[0][1]
        key = (first.key, next(size for size in _SIZES if size >= count))
        replay = self._by_size.get(key)
        if replay is None and self._by_size.admits(key) and self._may_capture():
            rows, results = self._take_buffers(members[0], key[1])
            compute = partial(run, first.layers, first.key.direction, rows, results)
            replay = self._capture(self._by_size, key, partial(self._record, first, compute))
        if replay is None:
            return self._run_each(members)
        copies = self._copies.pop(numbers, None)
        if copies is None:
            evict_oldest(self._copies, _MAX_COPIES)
            copies = self._find_copies(members)
        self._copies[numbers] = copies
        (inputs, given), (outputs, targets) = copies
        torch._foreach_copy_(inputs, given)
        replay()
        torch._foreach_copy_(targets, outputs)
        return [places for _, _, places in members]

    def _run_each(self, members: Sequence[Member]) -> list[Rows] | None:
        """Replay the graph of each call, if all have one: still faster than launching the kernels of the batch."""
        replays = [call.replay for _, call, _ in members]
        if not all(replays):
            return None
        for replay in replays:
            assert replay is not None
            replay()
        return [places for _, _, places in members]

    def _may_capture(self) -> bool:
        return time.monotonic() >= self._next_capture_at

    def _capture(self, cache: GraphCache[_Key, Replay], key: _Key, record: Callable[[], Replay | None]) -> Replay | None:
        started = time.monotonic()
        replay = record()
        ended = time.monotonic()
        cache.put(key, replay)
        self._next_capture_at = ended + (ended - started) * (1.0 / self._capture_time_share - 1.0)
        return replay

    def _record_set(self, members: Sequence[Member], count: int) -> Replay | None:
        first = members[0][1]
        rows, results = self._take_buffers(members[0], count)
        (inputs, given), (outputs, targets) = self._find_copies(members)

        def compute() -> None:
            torch._foreach_copy_(inputs, given)
            run(first.layers, first.key.direction, rows, results)
            torch._foreach_copy_(targets, outputs)

        return self._record(first, compute)

    def _take_buffers(self, like: Member, count: int) -> tuple[Rows, Rows]:
        """Memory for `count` rows of such a call, and for their results."""
        _, call, places = like
        rows = tuple(self._take_buffer(f"row {i}", t)[:count] for i, t in enumerate(call.rows))
        return rows, tuple(self._take_buffer(f"result {i}", t)[:count] for i, t in enumerate(places))

    def _find_copies(self, members: Sequence[Member]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Slices of the buffers, and the calls' tensors that belong to them: of rows, of results."""
        sizes = [call.rows[0].shape[0] for _, call, _ in members]
        tensors = [zip(*(call.rows for _, call, _ in members), strict=True), zip(*(p for *_, p in members), strict=True)]
        return [
            ([part for buffer in buffers for part in torch.split(buffer, sizes)], [t for column in columns for t in column])
            for buffers, columns in zip(self._take_buffers(members[0], sum(sizes)), tensors, strict=True)
        ]

    def _take_buffer(self, use: str, like: Tensor) -> Tensor:
        """Memory that all graphs of several calls of this width share; one runs at a time."""
        key = (use, like.shape[1], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(_MAX_ROWS_OF_SET, like.shape[1], dtype=like.dtype, device=like.device)
        return self._buffers[key]

    @torch.no_grad()
    def _record(self, call: BatchCall, compute: Callable[[], object]) -> Replay | None:
        """A function that repeats `compute`; None if it cannot be captured, which the log reports for `call`."""
        if self._device.type != "cuda":
            return torch.no_grad()(compute)
        self.captures += 1
        try:
            graph, _ = self._pool.capture(compute)
        except Exception as error:  # noqa: BLE001 - the batch runs without a graph then, and reports its own errors
            _log.warning("%s cannot be captured as a CUDA graph (%r): it runs without", call.layers[0].spec.paths[0], error)
            return None
        replay: Replay = graph.replay
        return replay
