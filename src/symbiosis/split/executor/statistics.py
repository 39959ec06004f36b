"""Totals of the executor and of each tenant since the start: what `stats` reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from symbiosis.split.executor.layers import BaseLayer
from symbiosis.types import WITH_BIAS, Direction


@dataclass(slots=True)
class TenantTotals:
    """Totals of one tenant."""

    calls: int = 0
    rows: int = 0
    training_rows: int = 0
    tokens: int = 0  # rows that entered the model's first layer forward
    errors: int = 0
    waited_s: float = 0.0  # time that calls spent in the queue
    last_run: float = 0.0  # start of the last batch with a call of this tenant

    def to_json(self) -> dict[str, Any]:
        totals = asdict(self)
        del totals["last_run"]
        totals["mean_wait_ms"] = round(totals.pop("waited_s") / max(1, self.calls) * 1e3, 4)
        return totals


class Statistics:
    """Totals of the executor. Written by one thread, readable from any."""

    def __init__(self, layers: Sequence[BaseLayer], clock: Callable[[], float]) -> None:
        self._layers, self._clock, self._started = layers, clock, clock()
        self._batches = self._calls = self._rows = self._tokens = 0
        self._busy_s = 0.0
        first = layers[0].spec.paths[0]
        self._entry = {0, *(layer.spec.handle for layer in layers if first.startswith(f"{layer.spec.paths[0]}."))}
        self.is_entry = lru_cache(maxsize=4096)(self._is_entry)

    def _is_entry(self, handles: tuple[int, ...], direction: Direction) -> bool:
        """Whether rows enter the model with such a call."""
        return not direction.is_backward and not self._entry.isdisjoint(handle & ~WITH_BIAS for handle in handles)

    def record_batch(self, calls: int, rows: int, seconds: float, *, is_entry: bool) -> None:
        self._batches += 1
        self._calls += calls
        self._rows += rows
        self._busy_s += seconds
        if is_entry:
            self._tokens += rows

    @property
    def tokens(self) -> int:
        return self._tokens

    def to_json(self) -> dict[str, Any]:
        batches = max(1, self._batches)
        return {
            "uptime_s": round(self._clock() - self._started, 3),
            "busy_s": round(self._busy_s, 3),
            "calls": self._calls,
            "batches": self._batches,
            "mean_batch": round(self._calls / batches, 4),
            "mean_rows": round(self._rows / batches, 2),
            "rows": self._rows,
            "tokens": self._tokens,
            "layers": len(self._layers),
            "bytes_held": self._count_weight_bytes(),
        }

    def _count_weight_bytes(self) -> int:
        """Bytes of all weights, shared ones once. The executor holds no other tensors."""
        storages: dict[int, int] = {}  # by address: fused layers share a storage
        for layer in self._layers:
            for tensor in (*layer.weights.values(), *(layer.module.parameters() if layer.module is not None else ())):
                storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return sum(storages.values())
