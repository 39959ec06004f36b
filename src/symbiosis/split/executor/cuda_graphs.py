"""Small calls that come again and again, as CUDA graphs: one launch instead of one for every kernel.

A decoding tenant says the same words from the same memory for every token,
and what its call costs is launching it. Tenants who travel together do so
together. For any company, the layers over so many rows below each other are a
graph, with the copies in and out around it; for one that stays together, the copies are in it too. Making
graphs keeps the executor's one thread, so those of companies take a bounded share of the time. Plain
reference: `runner.run_batch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from symbiosis.common.bounded_dict import evict_oldest
from symbiosis.gpu.cuda_graph import captured
from symbiosis.split.executor.batch import BatchCall
from symbiosis.split.executor.layers import Rows, run
from symbiosis.split.executor.sessions import BatchKey

_KNOWN, _KNOWN_TOGETHER = 4, 64  # what comes so often comes again; companies change, and do without one of their own
_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # rows
_ROWS, _ROWS_TOGETHER = 256, 512  # with more rows the GPU takes longer than the launches
_LAYERS = 4  # of one call: q, k and v, or gate and up
_MOST, _MOST_OF_ONE = 8192, 1024  # graphs of everybody together, and of one tenant
_MOST_PARTED = 2048  # companies whose copies are remembered
_log = logging.getLogger("symbiosis")


class BatchGraphs:
    """For works with places, on one stream: its graphs share the memory between their kernels."""

    def __init__(self, device: torch.device, making_share: float = 0.1, soon_s: float = 0.5) -> None:
        """`making_share` of the time may go into graphs of companies.

        What one tenant asks for again is known if it comes so soon: a prompt of the
        same length now and then is not worth a graph for each of its calls.
        """
        self._device, self._making_share, self._soon_s = device, making_share, soon_s
        self._make_from = 0.0
        """When the next of those may be made."""
        self.captures = 0
        """Graphs made so far: whoever times a batch leaves those out."""
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._works: dict[str, WeakSet[BatchCall]] = {}  # by tenant; they go with their channels
        self._parted: dict[tuple[int, ...], list[tuple[list[Tensor], list[Tensor]]]] = {}
        """Copies in and out by company. Those of a channel that is gone are never used again: its numbers do not come back."""
        self._joints: dict[tuple[int, ...], Callable[[], object] | None] = {}
        self._by_size: dict[tuple[BatchKey, int], Callable[[], object] | None] = {}
        self._seen: dict[Any, int] = {}
        self._memory: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def run(self, works: Sequence[tuple[str, BatchCall, Rows]]) -> list[Rows] | None:
        """The results of a batch, (tenant, work, its places) each, if it is known well enough; None: run it as it is."""
        if len(works[0][1].layers) > _LAYERS:
            return None
        if len(works) == 1:
            return self._alone(*works[0])
        return self._together(works)

    def _alone(self, tenant: str, work: BatchCall, places: Rows) -> list[Rows] | None:
        if work.replay is None:
            now = time.monotonic()
            work.runs = work.runs + 1 if now - work.ran < self._soon_s else 1
            work.ran = now
            if work.runs != _KNOWN or work.rows[0].shape[0] > _ROWS:
                return None
            kept = self._works.pop(tenant, None) or WeakSet()
            evict_oldest(self._works, _MOST_OF_ONE)  # tenants without a token can have as many names as they like
            self._works[tenant] = kept
            if len(kept) >= _MOST_OF_ONE:
                return None
            work.replay = self._record(work, partial(run, work.layers, work.key.direction, work.rows, places))
            if work.replay is None:
                return None
            kept.add(work)
        work.replay()
        return [places]

    def _together(self, works: Sequence[tuple[str, BatchCall, Rows]]) -> list[Rows] | None:
        company = tuple(sorted(work.number for _, work, _ in works))
        rows = sum(work.rows[0].shape[0] for _, work, _ in works)
        if rows > _ROWS_TOGETHER:
            return None
        if company not in self._joints:
            if not (self._is_known(company, _KNOWN_TOGETHER) and self._has_time()):
                return self._any_company(company, works, rows)
            evict_oldest(self._joints, _MOST)
            self._parted.pop(company, None)
            self._joints[company] = self._made(partial(self._record_joint, works, rows))
        replay = self._joints[company] = self._joints.pop(company)  # again at the end: who is used stays
        if replay is None:
            return None
        replay()
        return [places for _, _, places in works]

    def _any_company(
        self, company: tuple[int, ...], works: Sequence[tuple[str, BatchCall, Rows]], count: int
    ) -> list[Rows] | None:
        """By the graph of so many rows, whoever they are; the rest of its rows are nobody's."""
        first = works[0][1]
        kind = (first.key, next(size for size in _SIZES if size >= count))
        if kind not in self._by_size:
            if not (self._is_known(kind, _KNOWN) and self._has_time()):
                return self._one_by_one(works)
            evict_oldest(self._by_size, _MOST)
            rows, results = self._room(works[0], kind[1])
            compute = partial(run, first.layers, first.key.direction, rows, results)
            self._by_size[kind] = self._made(partial(self._record, first, compute))
        replay = self._by_size[kind] = self._by_size.pop(kind)
        if replay is None:
            return self._one_by_one(works)
        parted = self._parted.pop(company, None)
        if parted is None:
            evict_oldest(self._parted, _MOST_PARTED)
            parted = self._copies(works)
        self._parted[company] = parted
        (starts, given), (ends, wanted) = parted
        torch._foreach_copy_(starts, given)
        replay()
        torch._foreach_copy_(wanted, ends)
        return [places for _, _, places in works]

    def _has_time(self) -> bool:
        return time.monotonic() >= self._make_from

    def _made(self, make: Callable[[], Callable[[], object] | None]) -> Callable[[], object] | None:
        began = time.monotonic()
        made = make()
        ended = time.monotonic()
        self._make_from = ended + (ended - began) * (1.0 / self._making_share - 1.0)
        return made

    def _one_by_one(self, works: Sequence[tuple[str, BatchCall, Rows]]) -> list[Rows] | None:
        """If each is known for itself: several graphs are still faster than the kernels of a joint."""
        replays = [work.replay for _, work, _ in works]
        if not all(replays):
            return None
        for replay in replays:
            assert replay is not None
            replay()
        return [places for _, _, places in works]

    def _is_known(self, what: Any, times: int) -> bool:
        """Whether this company, or this size, has come so often that it will be kept."""
        count = self._seen.pop(what, 0) + 1
        evict_oldest(self._seen, _MOST)
        self._seen[what] = count
        return count >= times

    def _record_joint(self, works: Sequence[tuple[str, BatchCall, Rows]], count: int) -> Callable[[], object] | None:
        first = works[0][1]
        rows, results = self._room(works[0], count)
        (starts, given), (ends, wanted) = self._copies(works)

        def compute() -> None:
            torch._foreach_copy_(starts, given)
            run(first.layers, first.key.direction, rows, results)
            torch._foreach_copy_(wanted, ends)

        return self._record(first, compute)

    def _room(self, like: tuple[str, BatchCall, Rows], count: int) -> tuple[Rows, Rows]:
        """Memory for so many rows of such a work, and for their results."""
        _, work, places = like
        rows = tuple(self._take(f"row {i}", t)[:count] for i, t in enumerate(work.rows))
        return rows, tuple(self._take(f"result {i}", t)[:count] for i, t in enumerate(places))

    def _copies(self, works: Sequence[tuple[str, BatchCall, Rows]]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Parts of that memory, and whose they are: of rows, of results."""
        count = sum(work.rows[0].shape[0] for _, work, _ in works)
        sizes = [work.rows[0].shape[0] for _, work, _ in works]
        theirs = [zip(*(work.rows for _, work, _ in works), strict=True), zip(*(p for *_, p in works), strict=True)]
        return [
            ([part for memory in room for part in torch.split(memory, sizes)], [t for column in columns for t in column])
            for room, columns in zip(self._room(works[0], count), theirs, strict=True)
        ]

    def _take(self, use: str, like: Tensor) -> Tensor:
        """Memory that all joints of this width use in turn."""
        key = (use, like.shape[1], like.dtype)
        if key not in self._memory:
            self._memory[key] = torch.zeros(_ROWS_TOGETHER, like.shape[1], dtype=like.dtype, device=like.device)
        return self._memory[key]

    @torch.no_grad()
    def _record(self, work: BatchCall, compute: Callable[[], object]) -> Callable[[], object] | None:
        """What does this again and again; `work` is the one to name if it cannot be done."""
        if self._device.type != "cuda":
            return torch.no_grad()(compute)
        self.captures += 1
        try:
            if self._keeper is None:
                # A pool lives as long as a graph that uses it. This one stays when all tenants have left.
                self._pool, spare = torch.cuda.graph_pool_handle(), torch.zeros(8, device=self._device)
                self._keeper, _ = captured(lambda: spare.add_(1.0), self._pool)
            graph, _ = captured(compute, self._pool)
        except Exception as error:  # noqa: BLE001 - run as it is, whatever it did in there is told to its tenant then
            _log.warning("%s cannot be a CUDA graph (%r): it is run as it is", work.layers[0].spec.paths[0], error)
            self._keeper = None  # a failed capture may leave its pool unusable: the next one gets another
            return None
        replay: Callable[[], object] = graph.replay
        return replay
