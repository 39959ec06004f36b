"""Adapter cache: which adapters are resident on the device. Many more are served than fit.

The tiers are disk, host pool (pinned memory, only for a GPU) and device pool. The stepping thread makes all decisions,
between batches and without a lock. The loader's threads copy; `poll_loads` collects their results before the next plan.

Eviction is by LRFU (recency and frequency of requests) among adapters without requests and pins. An adapter that has
waited `max_wait_s` also evicts adapters in use, at the least cost: first those whose requests wait, then those that run,
fewest sequences first, then pinned ones. An adapter that runs drains before it is evicted: it admits no sequence. So every
requested adapter becomes resident.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.packing import align
from symbiosis.adapters.parts import Adapter
from symbiosis.common.lrfu_scores import LrfuScores
from symbiosis.errors import BadAdapter, SymbiosisError, UnsupportedAdapter
from symbiosis.serving.lora.adapter_loader import AdapterLoader, LoadTask
from symbiosis.serving.lora.adapter_registry import AdapterRecord, AdapterRegistry, AdapterVersion, PreparedAdapter
from symbiosis.serving.lora.byte_allocator import ByteAllocator, Cost
from symbiosis.serving.lora.converter import Converter, DivideAdapter
from symbiosis.serving.lora.device_pool import CpuPool, CudaPool
from symbiosis.serving.lora.host_pool import HostPool
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.packed_adapter import ALIGNMENT, PackedAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.scheduling.sequence import check_range
from symbiosis.store.artifact_folders import ArtifactFolders
from symbiosis.types import LayerKind


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCacheConfig:
    """Memory for adapters."""

    device_bytes: int = 2 << 30
    """Size of the device pool. A GPU allocates it at the start."""
    host_bytes: int = 4 << 30
    """Size of the host pool, pinned at the start. A CPU has none."""
    slots: int = 256
    """Most resident adapters. More than run at once, so that prefetches do not wait for a slot."""
    max_disk_loads: int = 4
    """Most concurrent loads from disk. Loads from the host pool are not counted."""
    max_wait_s: float = 1.0
    """An adapter that has waited this long evicts adapters in use."""

    def __post_init__(self) -> None:
        check_range("device_bytes", self.device_bytes, 1, 1 << 50, integer=True)
        check_range("host_bytes", self.host_bytes, 1, 1 << 50, integer=True)
        check_range("slots", self.slots, 1, 1 << 16, integer=True)
        check_range("max_disk_loads", self.max_disk_loads, 1, 1 << 10, integer=True)
        check_range("max_wait_s", self.max_wait_s, 0, 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCacheStats:
    """Adapters by tier, and totals since the start."""

    registered: int
    """Content hashes that a name or a request refers to."""
    resident: int
    """Those in the host pool or the device pool."""
    device: int
    device_bytes: int
    device_limit: int
    device_held: int
    """Bytes that the device pool has allocated: all of them on a GPU, those of its adapters on a CPU."""
    host: int
    host_bytes: int
    host_limit: int
    """All of it is allocated."""
    loading: int
    loads: int
    """Completed loads to the device."""
    load_s: float
    """Total latency of these loads."""
    reads: int
    """Reads from disk of adapters that no pool had."""
    failures: int
    device_evictions: int
    host_evictions: int


def make_pools(device: torch.device, config: AdapterCacheConfig) -> tuple[HostPool, CpuPool]:
    """The host pool and the device pool. A CPU computes in host memory, so its host pool is empty."""
    if device.type == "cpu":
        return HostPool(torch.empty(0, dtype=torch.uint8)), CpuPool(config.device_bytes)
    host = torch.empty(align(config.host_bytes, ALIGNMENT), dtype=torch.uint8, pin_memory=True)
    return HostPool(host), CudaPool(align(config.device_bytes, ALIGNMENT), device)


class AdapterCache:
    """The adapters of one model. For the stepping thread, except `prepare`, `prepare_loaded` and `wait`.

    `running` returns the number of running sequences by adapter; these adapters are not evicted. `on_load` is called when
    an adapter becomes resident, `on_evict` before its device memory is reused. `divide`: of the first of several shards.
    Adapters are read from `folders`. `chains` are models by hash, one or several. An adapter is for the
    one that `choose_chain` returns, unless it is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        config: AdapterCacheConfig,
        *,
        running: Callable[[], Mapping[str, int]],
        on_load: Callable[[PackedAdapter], None] = lambda packed: None,
        on_evict: Callable[[EngineAdapter], None],
        divide: DivideAdapter | None = None,
        folders: ArtifactFolders,
        chains: Mapping[str, PreTrainedModel] | None = None,
        choose_chain: Callable[[Adapter], str] = lambda adapter: "",
    ) -> None:
        self._config, self._running, self._on_load, self._on_evict = config, running, on_load, on_evict
        self._host, self._device = make_pools(model.device, config)
        linear = (LayerKind.LINEAR, LayerKind.CONV1D)
        layers = [path for path, module in facts.modules.items() if module.kind in linear]
        self.slots = SlotTable(config.slots, layers, model.device)
        self._choose_chain = choose_chain
        converters = {hash: Converter(each, divide) for hash, each in (chains or {"": model}).items()}
        self._loader = AdapterLoader(self._host, self._device, converters, facts, self.slots, folders)
        self.registry = AdapterRegistry()
        self.resident: OrderedDict[str, EngineAdapter] = OrderedDict()
        """Adapters on the device by hash, least recently used first."""
        self.draining: dict[str, str] = {}
        """Adapters that must not admit sequences, and the adapter that waits for their memory."""
        self._allocator = ByteAllocator(self._device.size)
        self._scores = LrfuScores()
        self._loading: dict[str, bool] = {}  # to the device; whether from disk
        self._waiting_since: dict[str, float] = {}  # adapters whose load has not started
        self._loads = self._failures = self._evictions = 0
        self._load_s = 0.0

    def prepare(self, folder: Path, chain: str | None = None) -> PreparedAdapter:
        """Read and check an adapter. Thread-safe. Raises `BadAdapter` or `UnsupportedAdapter`."""
        return self._prepare(self._loader.read(folder), folder, chain)

    def prepare_loaded(self, adapter: Adapter, folder: Path | None, chain: str | None = None) -> PreparedAdapter:
        """As `prepare`, for an adapter in memory. After an eviction it is read from `folder`. Thread-safe.

        Without a folder the adapter stays in host memory until it is unreferenced.
        """
        return self._prepare(adapter, folder, chain)

    def _prepare(self, adapter: Adapter, folder: Path | None, chain: str | None) -> PreparedAdapter:
        chain = self._choose_chain(adapter) if chain is None else chain
        packed = self._loader.convert(adapter, chain)
        for pool, limit in (("device", self._device.size), ("host", self._host.size)):
            if limit and packed.nbytes > limit:
                raise UnsupportedAdapter(f"adapter too large: {packed.nbytes} bytes > {limit} bytes of the {pool} pool")
        return PreparedAdapter(packed, packed if folder is None else folder, chain)

    def register(self, name: str, prepared: PreparedAdapter) -> AdapterVersion:
        """Serve an adapter under `name`. Accepted requests keep their version."""
        version, unused = self.registry.register(name, prepared)
        self._free(unused)
        self._scores.use(prepared.hash, len(self.resident))  # or the next load would evict it before its first request
        if prepared.hash not in self._allocator:
            self._cache(prepared.packed)
        return version

    def unregister(self, name: str) -> None:
        """Remove a name. The memory is freed with the last request. Raises `UnknownAdapter`."""
        self._free(self.registry.unregister(name))

    def lookup(self, name: str) -> AdapterRecord:
        """The record for a new request. Raises `UnknownAdapter`, or `BadAdapter` if it can no longer be read."""
        record = self.registry.get(self.registry.version(name).hash)
        assert record is not None
        if record.error is not None and record.hash not in self.resident:
            raise BadAdapter(f"{name!r} can no longer be read: {record.error}")
        return record

    def acquire(self, hash: str, sequences: int) -> None:
        """Count a new request with so many sequences."""
        self.registry.acquire(hash, sequences)
        self._scores.use(hash, len(self.resident))

    def release(self, hash: str) -> None:
        """Count the end of a sequence."""
        self._free(self.registry.release(hash))

    def touch(self, hash: str) -> bool:
        """Mark an adapter as most recently used. False if it is not resident."""
        if hash not in self.resident:
            return False
        self.resident.move_to_end(hash)
        return True

    def poll_loads(self) -> list[tuple[str, SymbiosisError]]:
        """Make loaded adapters resident. Returns failed loads with their errors. Between batches, before a plan."""
        failed = []
        for event in self._loader.poll():
            hash = event if isinstance(event, str) else event.task.hash
            record = self.registry.get(hash)
            if record is None:  # unregistered during the load
                self._host.drop(hash)
            if isinstance(event, str):
                continue
            del self._loading[hash]
            if record is not None and not isinstance(event.result, Exception):
                self._add_resident(*event.result)
                self._loads += 1
                self._load_s += event.seconds
                continue
            self._allocator.free(hash)
            if isinstance(event.result, Exception):
                self._failures += 1
                error = None if record is None else _load_error(record, event.task, event.result)
                if error is not None:
                    failed.append((hash, error))
        return failed

    def start_loads(self, missing: Sequence[str], now: float) -> None:
        """Load adapters that requests wait for, most urgent first, as far as memory allows. After a plan."""
        # A plan may leave out an adapter whose requests still wait.
        wanted = [hash for hash in dict.fromkeys((*self._waiting_since, *missing)) if hash not in self._allocator]
        records = {hash: record for hash in wanted if (record := self.registry.get(hash)) is not None and record.num_requests}
        self._waiting_since = {hash: self._waiting_since.get(hash, now) for hash in records}
        self.draining = {}
        overdue = {hash: since for hash, since in self._waiting_since.items() if now - since >= self._config.max_wait_s}
        too_large = 1 << 62
        for hash in dict.fromkeys((*overdue, *missing)):
            record, is_overdue = records.get(hash), hash in overdue
            if record is None or (record.nbytes >= too_large and not is_overdue):
                continue
            if sum(self._loading.values()) >= self._config.max_disk_loads and hash not in self._host:
                continue
            if self._evict_for(hash, record.nbytes, evict_in_use=is_overdue):
                self._start_load(record)
            elif is_overdue:
                break  # no other adapter takes the memory it waits for
            else:
                too_large = record.nbytes

    def wait(self, seconds: float) -> None:
        """Block until `poll_loads` has something to do, at most so long. Thread-safe."""
        self._loader.wait(seconds)

    def set_load_callback(self, callback: Callable[[], None]) -> None:
        """The loader's threads call `callback` when `poll_loads` has something to do."""
        self._loader.on_event = callback

    def stats(self) -> AdapterCacheStats:
        in_host = self._host.hashes()
        return AdapterCacheStats(
            registered=len(self.registry),
            resident=len(in_host | set(self.resident)),
            device=len(self.resident),
            device_bytes=self._allocator.used,
            device_limit=self._device.size,
            device_held=self._device.size if self._device.is_allocated else self._allocator.used,
            host=len(in_host),
            host_bytes=self._host.used,
            host_limit=self._host.size,
            loading=len(self._loading),
            loads=self._loads,
            load_s=self._load_s,
            reads=self._loader.reads,
            failures=self._failures,
            device_evictions=self._evictions,
            host_evictions=self._host.evictions,
        )

    def check_integrity(self) -> None:
        """Asserts that memory, slots and records match."""
        self._allocator.check_integrity()
        self.slots.check_integrity(set(self.resident))
        assert self.resident.keys().isdisjoint(self._loading)
        assert len(self._allocator) == len(self.resident) + len(self._loading)
        assert all(self.registry.get(hash) is not None for hash in self.resident)

    def _free(self, unused: AdapterRecord | None) -> None:
        if unused is not None:
            if unused.hash in self.resident:
                self._evict(unused.hash)
            self._host.drop(unused.hash)
            self._scores.discard(unused.hash)

    def _cache(self, packed: PackedAdapter) -> None:
        """Put a new adapter into the first tier, so that the first request does not read it again."""
        hash, adopted = packed.adapter.hash, self._device.adopt(packed)
        if adopted is None:
            self._loader.store_in_host(packed)
        elif self._evict_for(hash, packed.nbytes, evict_in_use=False):
            self._allocator.allocate(hash, packed.nbytes)
            self._add_resident(adopted, self.slots.build_entries(adopted.adapter))

    def _add_resident(self, packed: PackedAdapter, entries_M4: Tensor) -> None:
        self._on_load(packed)
        self.slots.assign(packed.adapter.hash, entries_M4)
        self.resident[packed.adapter.hash] = packed.adapter

    def _evict(self, hash: str) -> None:
        self._on_evict(self.resident.pop(hash))
        self.slots.clear(hash)
        self._allocator.free(hash)

    def _evict_for(self, hash: str, nbytes: int, *, evict_in_use: bool) -> bool:
        """Evict until a slot and `nbytes` contiguous bytes are free. False if victims must drain first, or none qualify."""
        running = self._running()
        ages = {other: age for age, other in enumerate(sorted(self.resident, key=self._scores.get))}  # of equal ones, LRU

        def cost(other: str) -> Cost | None:
            record = self.registry.get(other)
            if record is None or other not in ages:
                return None  # loading
            pinned = self.registry.is_pinned(other)
            if not record.num_requests and not pinned:
                return (0, ages[other])
            return (3 if pinned else 2 if other in running else 1, running.get(other, 0)) if evict_in_use else None

        victims = self._allocator.select_victims(nbytes, cost)
        if victims is None:
            return False
        if not victims and self.slots.num_free <= len(self._loading):
            candidates = [(each, other) for other in ages if (each := cost(other)) is not None]
            if not candidates:
                return False
            victims = [min(candidates)[1]]
        busy = [victim for victim in victims if victim in running]
        if busy:
            self.draining = dict.fromkeys(busy, hash)
            return False
        for victim in victims:
            self._evict(victim)
        self._evictions += len(victims)
        return True

    def _start_load(self, record: AdapterRecord) -> None:
        offset = self._allocator.allocate(record.hash, record.nbytes)
        assert offset is not None, "evictions freed the memory"
        self._loading[record.hash] = record.hash not in self._host
        fence = self._device.record_fence()
        self._loader.submit(LoadTask(record.hash, record.chain, tuple(record.sources), offset, fence, time.monotonic()))


def _load_error(record: AdapterRecord, task: LoadTask, error: Exception) -> SymbiosisError | None:
    """The error for requests that wait for this adapter; None if it has new sources to try."""
    if not set(record.sources) <= set(task.sources):
        return None
    if not isinstance(error, SymbiosisError):
        return SymbiosisError(f"failed to load the adapter to the device: {type(error).__name__}")
    record.error = str(error)
    return error
