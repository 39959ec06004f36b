"""The one source of statistics: split tenants, HTTP requests, jobs, adapters, batches and memory, with their history.

`symbiosis top`, `/metrics` and `/v1/statistics` show what `StatisticsSource` collects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symbiosis.adapters.names import split_qualified_name
from symbiosis.app.statistics.history import INTERVAL_S, History
from symbiosis.app.statistics.memory import CPU, account_memory, count_storages, read_total
from symbiosis.app.training_service import TrainingService
from symbiosis.errors import Closed, SymbiosisError
from symbiosis.jobs.states import JobState
from symbiosis.server.metrics.counts import TENANT_COUNTERS
from symbiosis.server.services.http_counts import Deliver, HttpCounts
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.split.executor.service import Service
from symbiosis.split.executor.statistics import TenantTotals

_ENGINE_TIMEOUT_S = 5.0
"""A step longer than this leaves the engine's last statistics in place."""
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostedParts:
    """The parts of hosted serving and training that have statistics."""

    core: EngineCore
    engine_loop: EngineLoop
    counts: HttpCounts
    training: TrainingService | None
    has_keys: bool
    """Whether HTTP requests need a key."""


class StatisticsSource:
    """Collects the statistics of this process. Every method is thread-safe.

    `weights` are the base model's tensors. `split` is the executor's service; None: there are no split tenants.
    """

    def __init__(
        self,
        model: str,
        device: torch.device,
        weights: Iterable[Tensor],
        split: Service | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._split, self._clock, self._started = model, split, clock, clock()
        on_gpu = device.type == "cuda"
        self._device = f"cuda:{device.index or 0}" if on_gpu else str(device)
        self._devices = [self._device, CPU] if on_gpu else [CPU]
        self._weight_bytes = count_storages(weights)
        self._hosted: HostedParts | None = None
        self._serving: dict[str, Any] = {}  # the engine's last statistics
        self._history = History()
        self._pending: list[Deliver] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="symbiosis-statistics", daemon=True)
        self._thread.start()

    def attach(self, hosted: HostedParts) -> None:
        """Include hosted serving and training: those of the last call."""
        self._hosted = hosted

    def count_weights(self, tensors: Iterable[Tensor]) -> None:
        """Count these instead of the weights given at the start, which are among them."""
        self._weight_bytes = count_storages(tensors)

    def detach(self, hosted: HostedParts) -> None:
        """They are closing."""
        if self._hosted is hosted:
            self._hosted, self._serving = None, {}

    def collect(self, deliver: Deliver) -> None:
        """Pass a snapshot, or why there is none, to `deliver`, on the thread of this object. Returns at once."""
        with self._changed:
            if not self._closing:
                self._pending.append(deliver)
                self._changed.notify()
                return
        deliver(Closed("the executor was closed"))

    def snapshot(self) -> dict[str, Any]:
        """All statistics as JSON. HTTP processes have a moment to send what they counted."""
        hosted, split = self._hosted, {} if self._split is None else self._split.stats()
        if hosted is not None:
            hosted.counts.flush()
        serving = self._fetch_serving(hosted)
        jobs = [] if hosted is None else hosted.counts.jobs()
        states = {state.value: 0 for state in JobState}
        for _, state, count in jobs:
            states[state] = states.get(state, 0) + count
        return {
            "model": self._model,
            "uptime_s": round(self._clock() - self._started, 3),
            **split,
            "device": self._device,
            "tenants": self._tenants(split.get("tenants", {}), hosted, serving),
            "serving": serving,
            "http": None if hosted is None else {**hosted.counts.http(), "has_keys": hosted.has_keys},
            "jobs": {} if hosted is None else states,
            "training": None if hosted is None or hosted.training is None else hosted.training.stats(),
            "memory": self._memory(hosted, serving),
            "history": self._history.to_json(),
        }

    def close(self) -> None:
        """Pending calls of `collect` get `Closed`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _fetch_serving(self, hosted: HostedParts | None) -> dict[str, Any]:
        """Empty without an engine, and until its first statistics."""
        if hosted is None:
            return {}
        with suppress(FutureTimeout, SymbiosisError):
            serving = hosted.engine_loop.fetch_stats().result(_ENGINE_TIMEOUT_S)
            if self._hosted is hosted:
                self._serving = serving
        return self._serving

    def _tenants(self, split: dict[str, Any], hosted: HostedParts | None, serving: dict[str, Any]) -> dict[str, Any]:
        """One row for each tenant, over the three ways in."""
        counts = {} if hosted is None else hosted.counts.tenants()
        jobs: dict[str, dict[str, int]] = {}
        for tenant, state, count in [] if hosted is None else hosted.counts.jobs():
            jobs.setdefault(tenant, {})[state] = count
        adapters: dict[str, list[str]] = {}
        for full in serving.get("adapters", ()):
            owner, name = split_qualified_name(full)
            if owner is not None:
                adapters.setdefault(owner, []).append(name)
        idle = {**TenantTotals().to_json(), "sessions": 0, "last_seen_s": None}
        return {
            tenant: {
                **split.get(tenant, idle),
                **counts.get(tenant, dict.fromkeys(TENANT_COUNTERS, 0)),
                "jobs": jobs.get(tenant, {}),
                "adapters": sorted(adapters.get(tenant, ())),
            }
            for tenant in dict.fromkeys((*split, *counts, *jobs, *adapters))
        }

    def _memory(self, hosted: HostedParts | None, serving: dict[str, Any]) -> dict[str, dict[str, int]]:
        owners: dict[str, dict[str, int]] = {"base_weights": self._weight_bytes}
        if hosted is not None:
            cache = serving.get("adapter_cache", {})
            adapters = {CPU: cache.get("host_limit", 0)}
            adapters[self._device] = adapters.get(self._device, 0) + cache.get("device_held", 0)
            owners["packed_weights"] = {CPU: hosted.core.packed_bytes}
            cached = {CPU: hosted.core.host_tier.nbytes}
            cached[self._device] = cached.get(self._device, 0) + hosted.core.kv_cache_bytes
            owners["kv_cache"] = cached
            owners["adapters"] = adapters
            owners["training"] = count_storages([] if hosted.training is None else hosted.training.tensors())
        return account_memory(self._devices, owners, {device: read_total(device) for device in self._devices})

    # On the thread of this object

    def _run(self) -> None:
        next_s = self._clock()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._pending, max(0.0, next_s - self._clock()))
                pending, self._pending = self._pending, []
                if self._closing:
                    break
            if pending:
                result = self._try_snapshot()
                for deliver in pending:
                    deliver(result)
            if self._clock() >= next_s:
                next_s = self._clock() + INTERVAL_S
                try:
                    self._sample()
                except Exception:  # noqa: BLE001 - the next sample may succeed
                    _log.exception("statistics could not be sampled")
        for deliver in pending:
            deliver(Closed("the executor was closed"))

    def _try_snapshot(self) -> dict[str, Any] | SymbiosisError:
        try:
            return self.snapshot()
        except Exception as error:  # noqa: BLE001 - every request has a reply
            _log.exception("statistics could not be collected")
            return SymbiosisError(f"statistics could not be collected: {type(error).__name__}")

    def _sample(self) -> None:
        """A few numbers that other threads change: each is read at once, and none of these threads is woken."""
        totals = {"split_tokens": 0 if self._split is None else self._split.batcher.statistics.tokens}
        gauges = {"memory_bytes": sum(read_total(device) for device in self._devices)}
        hosted = self._hosted
        if hosted is not None:
            for row in hosted.counts.tenants().values():
                for name in ("generated_tokens", "prompt_tokens"):
                    totals[name] = totals.get(name, 0) + row[name]
            if hosted.training is not None:
                totals["trained_tokens"] = hosted.training.jobs.stats.tokens
            scheduler = hosted.core.scheduler
            blocks = scheduler.block_manager
            gauges |= {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
            gauges["kv_blocks_used"] = blocks.num_blocks - blocks.num_free_blocks
        self._history.record(self._clock() - self._started, totals, gauges)
