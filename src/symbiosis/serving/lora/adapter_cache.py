"""Which adapters are on the device. Many more are served than fit.

All decisions are made on the stepping thread, between passes, without a lock: who gets room on the device, who
leaves. The `carrier`'s threads carry them out, and what they have done is taken up before the next plan.

Who leaves: whoever has no request, least recently used first. If that is not enough for somebody who has waited
`patience_s`, adapters whose requests wait too, then those that run, with the fewest sequences first: these admit
nobody until they are free (`draining`). So whatever is asked for gets its turn, since what runs ends.
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
from symbiosis.adapters.parts import Adapter
from symbiosis.errors import BadAdapter, SymbiosisError, UnsupportedAdapter
from symbiosis.serving.lora.adapter_loader import AdapterLoader, LoadTask, Place
from symbiosis.serving.lora.adapter_registry import AdapterRecord, AdapterRegistry, AdapterVersion
from symbiosis.serving.lora.byte_allocator import ByteAllocator, Cost
from symbiosis.serving.lora.converter import Converter
from symbiosis.serving.lora.device_pool import CpuPool, CudaPool
from symbiosis.serving.lora.host_pool import HostPool, NullHostPool
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter, aligned
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.scheduling.sequence import check_range
from symbiosis.types import LayerKind


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCacheConfig:
    """How much memory adapters get."""

    device_bytes: int = 2 << 30
    """Adapters that are computed with. On a GPU this is taken at the start."""
    host_bytes: int = 4 << 30
    """Adapters ready to be copied to a GPU, pinned at the start; a CPU has no such level."""
    slots: int = 256
    """Most adapters on the device; more than run at once, so that the next can come meanwhile."""
    max_coming: int = 4
    """Most adapters on their way from disk at once. Those in host memory come besides: they do not wait for disks."""
    patience_s: float = 1.0
    """Who has waited so long for room is made room for."""

    def __post_init__(self) -> None:
        check_range("device_bytes", self.device_bytes, 1, 1 << 50, integer=True)
        check_range("host_bytes", self.host_bytes, 1, 1 << 50, integer=True)
        check_range("slots", self.slots, 1, 1 << 16, integer=True)
        check_range("max_coming", self.max_coming, 1, 1 << 10, integer=True)
        check_range("patience_s", self.patience_s, 0, 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCacheStats:
    """Where adapters are, and what was moved so far."""

    registered: int
    """Contents that a name or a request needs."""
    resident: int
    """Those that have memory, on any level."""
    device: int
    device_bytes: int
    device_limit: int
    host: int
    host_bytes: int
    host_limit: int
    coming: int
    loads: int
    """How often one was brought to the device."""
    load_s: float
    """From being sent for to being there, all loads together."""
    reads: int
    """How often one was read because it was in no memory."""
    failures: int
    device_evictions: int
    host_evictions: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """An adapter that was read and checked, and is not served under any name yet."""

    flat: PackedAdapter
    place: Place

    @property
    def hash(self) -> str:
        return self.flat.loaded.hash


def places(device: torch.device, config: AdapterCacheConfig) -> tuple[NullHostPool, CpuPool]:
    """The levels this device has."""
    if device.type == "cpu":
        return NullHostPool(), CpuPool(config.device_bytes)
    host = torch.empty(aligned(config.host_bytes), dtype=torch.uint8, pin_memory=True)
    return HostPool(host), CudaPool(aligned(config.device_bytes), device)


class AdapterCache:
    """The adapters of one model. Used by the stepping thread, but for `prepare`, `take` and `wait`.

    `running` says how many sequences of each adapter are at work; these adapters stay.
    `on_leave` is told before an adapter's memory on the device becomes another's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        config: AdapterCacheConfig,
        *,
        running: Callable[[], Mapping[str, int]],
        on_leave: Callable[[EngineAdapter], None],
    ) -> None:
        self._config, self._running, self._on_leave = config, running, on_leave
        self._host, self._device = places(model.device, config)
        linear = (LayerKind.LINEAR, LayerKind.CONV1D)
        members = [path for path, module in facts.modules.items() if module.kind in linear]
        self.slots = SlotTable(config.slots, members, model.device)
        self._carrier = AdapterLoader(self._host, self._device, Converter(model), facts, self.slots)
        self._registry = AdapterRegistry()
        self.loaded: dict[str, EngineAdapter] = {}
        """What can be computed with now, by hash."""
        self.draining: dict[str, str] = {}
        """Adapters that must admit nobody, and who waits for their memory."""
        self._arena = ByteAllocator(self._device.size)
        self._slots: OrderedDict[str, int] = OrderedDict()  # of those on the device, longest not used first
        self._coming: dict[str, bool] = {}  # those on their way, and whether from disk
        self._since: dict[str, float] = {}  # who waits to be sent for, and since when
        self._loads = self._failures = self._evictions = 0
        self._load_s = 0.0

    # Names

    def prepare(self, folder: Path) -> PreparedAdapter:
        """Read and check an adapter. Any thread may, while another steps. Raises what is wrong with it."""
        return self._prepared(self._carrier.read(folder), folder)

    def take(self, adapter: Adapter, folder: Path | None) -> PreparedAdapter:
        """The same of an adapter that is in memory; should it have to leave the device, `folder` has it. Any thread may.

        Without a folder it stays in memory for as long as a name or a request needs it.
        """
        flat = self._carrier.convert(adapter)
        return self._prepared(flat, flat if folder is None else folder)

    def _prepared(self, flat: PackedAdapter, place: Place) -> PreparedAdapter:
        for what, limit in (("on the device", self._device.size), ("in host memory", self._host.size)):
            if limit is not None and flat.size > limit:
                raise UnsupportedAdapter(
                    f"the adapter takes {flat.size} bytes, and all adapters together may have {limit} {what}"
                )
        return PreparedAdapter(flat, place)

    def put(self, name: str, prepared: PreparedAdapter) -> AdapterVersion:
        """Serve it under this name from now on. Who has an older version keeps it."""
        flat = prepared.flat
        virtual = flat.loaded.virtual.count if flat.loaded.virtual else 0
        version, gone = self._registry.put(name, prepared.hash, flat.size, virtual, prepared.place)
        self._let_go(gone)
        if prepared.hash not in self._arena:
            self._keep(prepared.hash, flat)
        return version

    def remove(self, name: str) -> None:
        """Nobody new gets it; its memory is free when its last request has ended. Raises `UnknownAdapter`."""
        self._let_go(self._registry.remove(name))

    def pin(self, name: str, pinned: bool) -> None:
        """A pinned adapter leaves the device only if there is no other way. Raises `UnknownAdapter`."""
        self._registry.pin(name, pinned)

    @property
    def versions(self) -> dict[str, AdapterVersion]:
        """What each name means."""
        return self._registry.versions

    @property
    def pinned(self) -> frozenset[str]:
        """Names."""
        return self._registry.pinned

    # Requests

    def find(self, name: str) -> AdapterRecord:
        """What a new request for this name gets. Raises `UnknownAdapter`, or why it cannot be had any more."""
        record = self._registry.get(self._registry.version(name).hash)
        assert record is not None
        if record.broken is not None and record.hash not in self._slots:
            raise BadAdapter(f"{name!r} cannot be read any more: {record.broken}")
        return record

    def hold(self, hash: str, count: int) -> None:
        """So many requests need it."""
        self._registry.hold(hash, count)

    def release(self, hash: str) -> None:
        """A request has ended."""
        self._let_go(self._registry.release(hash))

    def is_here(self, hash: str) -> bool:
        """Whether it can be computed with now; who asks uses it."""
        if hash not in self._slots:
            return False
        self._slots.move_to_end(hash)
        return True

    # The table of kernels (`bank.Table`)

    @property
    def device(self) -> torch.device:
        return self.slots.table_SM4.device

    @property
    def rank(self) -> int:
        return self.slots.rank

    def of(self, *paths: str) -> Tensor:
        return self.slots.of(*paths)

    def slot(self, adapter: EngineAdapter) -> int:
        return self._slots[adapter.hash]

    # Movements

    def take_up(self) -> list[tuple[str, SymbiosisError]]:
        """What has arrived can be computed with; returns what failed, and why. Between passes, before a plan."""
        failed = []
        for arrival in self._carrier.arrivals():
            hash = arrival if isinstance(arrival, str) else arrival.job.hash
            record = self._registry.get(hash)
            if record is None:  # it went while it came
                self._host.drop(hash)
            if isinstance(arrival, str):
                continue
            del self._coming[hash]
            if isinstance(arrival.found, Exception):
                self._arena.give(hash)
                self._failures += 1
                error = None if record is None else self._failed(record, arrival.job, arrival.found)
                if error is not None:
                    failed.append((hash, error))
            elif record is None:
                self._arena.give(hash)
            else:
                self._settle(*arrival.found)
                self._loads += 1
                self._load_s += arrival.seconds
        return failed

    def send_for(self, missing: Sequence[str], now: float) -> None:
        """Somebody waits for these, the most urgent first: bring them, as far as there is room. After a plan."""
        # a plan may leave somebody out who still waits
        wanted = [hash for hash in dict.fromkeys((*self._since, *missing)) if hash not in self._arena]
        records = {hash: record for hash in wanted if (record := self._registry.get(hash)) is not None and record.users}
        self._since = {hash: self._since.get(hash, now) for hash in records}
        self.draining = {}
        waited = {hash: since for hash, since in self._since.items() if now - since >= self._config.patience_s}
        too_large = 1 << 62
        for hash in dict.fromkeys((*waited, *missing)):
            record, urgent = records.get(hash), hash in waited
            if record is None or (record.size >= too_large and not urgent):
                continue
            if sum(self._coming.values()) >= self._config.max_coming and not self._host.has(hash):
                continue
            if self._make_room(hash, record.size, urgent=urgent):
                self._send(record)
            elif urgent:
                break  # nobody else takes what it waits for
            else:
                too_large = record.size

    def wait(self, seconds: float) -> None:
        """Return when there is something to take up, or after so long."""
        self._carrier.wait(seconds)

    def call_on_news(self, action: Callable[[], None]) -> None:
        """Have this called, by other threads, when there is something to take up."""
        self._carrier.on_news = action

    def figures(self) -> AdapterCacheStats:
        in_host = self._host.hashes()
        return AdapterCacheStats(
            registered=len(self._registry),
            resident=len(in_host | set(self._slots)),
            device=len(self._slots),
            device_bytes=self._arena.used,
            device_limit=self._device.size,
            host=len(in_host),
            host_bytes=self._host.used,
            host_limit=self._host.size or 0,
            coming=len(self._coming),
            loads=self._loads,
            load_s=self._load_s,
            reads=self._carrier.reads,
            failures=self._failures,
            device_evictions=self._evictions,
            host_evictions=self._host.evictions,
        )

    def check_integrity(self) -> None:
        """Everything adds up; tests call it."""
        self._arena.check_integrity()
        assert self._slots.keys().isdisjoint(self._coming)
        assert len(self._arena) == len(self._slots) + len(self._coming)
        assert set(self.loaded) == set(self._slots)
        assert self.slots.free == self._config.slots - len(self._slots)
        assert len(set(self._slots.values())) == len(self._slots)
        assert all(self._registry.get(hash) is not None for hash in self._slots)

    def _let_go(self, record: AdapterRecord | None) -> None:
        if record is not None:
            if record.hash in self._slots:
                self._leave(record.hash)
            self._host.drop(record.hash)

    def _keep(self, hash: str, flat: PackedAdapter) -> None:
        """It was just read: it need not be read again soon."""
        here = self._device.adopt(flat)
        if here is None:
            self._carrier.keep(hash, flat)
        elif self._make_room(hash, flat.size, urgent=False):
            self._arena.take(hash, flat.size)
            self._settle(here, self.slots.lines(here.loaded))

    def _settle(self, flat: PackedAdapter, lines_M4: Tensor) -> None:
        self._slots[flat.loaded.hash] = self.slots.take(lines_M4)
        self.loaded[flat.loaded.hash] = flat.loaded

    def _leave(self, hash: str) -> None:
        self._on_leave(self.loaded.pop(hash))
        self.slots.give(self._slots.pop(hash))
        self._arena.give(hash)

    def _make_room(self, hash: str, size: int, *, urgent: bool) -> bool:
        """Let those leave that may, so that `size` bytes in a row and a slot are free; False if that cannot be now."""
        running = self._running()
        ages = {other: age for age, other in enumerate(self._slots)}

        def cost(other: str) -> Cost | None:
            record = self._registry.get(other)
            if record is None or other not in ages:
                return None  # on its way
            pinned = self._registry.is_pinned(other)
            if not record.users and not pinned:
                return (0, ages[other])
            return (3 if pinned else 2 if other in running else 1, running.get(other, 0)) if urgent else None

        leaving = self._arena.cheapest(size, cost)
        if leaving is None:
            return False
        if not leaving and self.slots.free <= len(self._coming):
            priced = [(price, other) for other in ages if (price := cost(other)) is not None]
            if not priced:
                return False
            leaving = [min(priced)[1]]
        busy = [other for other in leaving if other in running]
        if busy:
            self.draining = dict.fromkeys(busy, hash)
            return False
        for other in leaving:
            self._leave(other)
        self._evictions += len(leaving)
        return True

    def _send(self, record: AdapterRecord) -> None:
        offset = self._arena.take(record.hash, record.size)
        assert offset is not None, "room was made"
        self._coming[record.hash] = not self._host.has(record.hash)
        self._carrier.send(LoadTask(record.hash, tuple(record.places), offset, self._device.fence(), time.monotonic()))

    def _failed(self, record: AdapterRecord, job: LoadTask, error: Exception) -> SymbiosisError | None:
        """What those who wait for it are told; None: there is another place to look for it now."""
        if not set(record.places) <= set(job.places):
            return None
        if not isinstance(error, SymbiosisError):
            return SymbiosisError(f"the adapter could not be brought to the device: {type(error).__name__}")
        record.broken = str(error)
        return error
