"""Loads adapters from disk to the host pool and on to the device pool, on its own threads.

One thread copies to the device and another reads from disk: a copy from the host pool never waits for a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Adapter
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter, SymbiosisError
from symbiosis.serving.lora.adapter_registry import Source, on_chain
from symbiosis.serving.lora.converter import Converter
from symbiosis.serving.lora.device_pool import CpuPool
from symbiosis.serving.lora.host_pool import HostPool
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.store.artifact_folders import ArtifactFolders

_log = logging.getLogger("symbiosis")

LoadResult: TypeAlias = tuple[PackedAdapter, Tensor] | Exception
"""The adapter on the device with its entries of the slot table, or the error."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTask:
    """A load to the device."""

    hash: str
    chain: str
    """Hash of the adapter's chain; empty: the engine has one model."""
    sources: tuple[Source, ...]
    """Tried in this order."""
    offset: int
    """In the device pool."""
    fence: torch.cuda.Event | None
    """The last work that may read the bytes at `offset`."""
    submitted: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """The end of a load."""

    task: LoadTask
    result: LoadResult
    seconds: float


class AdapterLoader:
    """Tasks in, events out. Its threads call `on_event` whenever `poll` has something to return."""

    def __init__(
        self,
        host: HostPool,
        device: CpuPool,
        converters: Mapping[str, Converter],
        facts: ModelFacts,
        slots: SlotTable,
        folders: ArtifactFolders,
    ) -> None:
        """`converters`: for each chain, by its hash."""
        self._host, self._device, self._slots = host, device, slots
        self._converters, self._facts, self._folders = converters, facts, folders
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-copies")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-reads")
        self._events: SimpleQueue[LoadedAdapter | str] = SimpleQueue()
        self._has_events = threading.Event()
        self.on_event: Callable[[], None] = lambda: None
        self.reads = 0
        """Reads from disk of adapters that no pool had."""

    def read(self, folder: Path) -> Adapter:
        """Read and check an adapter in the calling thread. Raises what is wrong with it, or with the store."""
        with self._folders.hold(folder) as held:
            return read_adapter(held, self._facts)

    def convert(self, adapter: Adapter, chain: str) -> PackedAdapter:
        """A checked adapter in the engine's form, on a chain. Raises `UnsupportedAdapter`."""
        if chain:
            adapter = replace(adapter, hash=on_chain(adapter.hash, chain))
        with self._device.use_side_stream(), torch.no_grad():
            return self._converters[chain].convert(adapter)

    def store_in_host(self, packed: PackedAdapter) -> None:
        """Copy an adapter to the host pool in the background."""
        self._reader.submit(self._store_in_host, packed)

    def submit(self, task: LoadTask) -> None:
        """Start a load. Exactly one `LoadedAdapter` follows."""
        self._copier.submit(self._copy, task, None)

    def poll(self) -> list[LoadedAdapter | str]:
        """Events since the last call. A hash: the host pool has that adapter now."""
        self._has_events.clear()
        events: list[LoadedAdapter | str] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def wait(self, seconds: float) -> None:
        """Block until there are events, at most so long."""
        self._has_events.wait(seconds)

    def _publish(self, event: LoadedAdapter | str) -> None:
        self._events.put(event)
        self._has_events.set()
        self.on_event()

    def _finish(self, task: LoadTask, result: LoadResult) -> None:
        if isinstance(result, Exception):
            unexpected = None if isinstance(result, SymbiosisError) else result
            _log.warning("failed to load an adapter: %s", result, exc_info=unexpected)
        self._publish(LoadedAdapter(task, result, time.monotonic() - task.submitted))

    def _store_in_host(self, packed: PackedAdapter) -> None:
        try:
            self._host.release(self._host.put(packed))
        except Exception:  # noqa: BLE001 - the adapter can be read again
            _log.exception("failed to store an adapter in host memory")
        self._publish(packed.adapter.hash)

    def _copy(self, task: LoadTask, packed: PackedAdapter | None) -> None:
        """`packed`: a reference to the adapter, if it was read for this task."""
        try:
            packed = packed or self._host.acquire(task.hash)
            if packed is None:
                self._reader.submit(self._read, task)
                return
            try:
                on_device = self._device.copy_in(packed, task.offset, task.fence)
            finally:
                self._host.release(packed)
            self._finish(task, (on_device, self._slots.build_entries(on_device.adapter)))
        except Exception as error:  # noqa: BLE001 - requests wait for this task
            self._finish(task, error)

    def _read(self, task: LoadTask) -> None:
        try:
            packed = self._host.acquire(task.hash)  # it may have been stored in the meantime
            if packed is None:
                packed = self._host.put(self._read_sources(task))
            self._copier.submit(self._copy, task, packed)
        except Exception as error:  # noqa: BLE001 - requests wait for this task
            self._finish(task, error)

    def _read_sources(self, task: LoadTask) -> PackedAdapter:
        errors: list[SymbiosisError] = []
        for source in task.sources:
            if isinstance(source, PackedAdapter):
                return source
            self.reads += 1
            try:
                packed = self.convert(self.read(source), task.chain)
            except SymbiosisError as error:
                errors.append(error)
                continue
            if packed.adapter.hash == task.hash:
                return packed
            errors.append(
                BadAdapter(
                    f"the files in {source.name!r} changed after they were loaded: load the adapter again, and write new "
                    "versions to new folders, because accepted requests may still need the old one"
                )
            )
        raise errors[0]
