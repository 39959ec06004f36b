"""Carries adapters from disk to host memory and on to the device, on threads of its own.

One thread copies to the device, one reads from disk for it: what is in host memory never waits for a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Adapter
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter, SymbiosisError
from symbiosis.serving.lora.converter import Converter
from symbiosis.serving.lora.device_pool import CpuPool
from symbiosis.serving.lora.host_pool import NullHostPool
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.lora.slot_table import SlotTable

_log = logging.getLogger("symbiosis")


Place: TypeAlias = Path | PackedAdapter
"""A folder with an adapter, or the adapter itself where no folder has it."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTask:
    """An adapter that is wanted on the device."""

    hash: str
    places: tuple[Place, ...]
    """Where it may be had, in this order."""
    offset: int
    """Where it is to lie."""
    fence: torch.cuda.Event | None
    """What still reads what lay there."""
    sent: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """A job's end: the adapter on the device and its lines of the table, or what went wrong."""

    job: LoadTask
    found: tuple[PackedAdapter, Tensor] | Exception
    seconds: float


class AdapterLoader:
    """Jobs in, arrivals out. `on_news` is called by its threads whenever `arrivals` has more."""

    def __init__(self, host: NullHostPool, device: CpuPool, converter: Converter, facts: ModelFacts, slots: SlotTable) -> None:
        self._host, self._device, self._slots = host, device, slots
        self._converter, self._facts = converter, facts
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-copies")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-reads")
        self._arrived: SimpleQueue[LoadedAdapter | str] = SimpleQueue()
        self._news = threading.Event()
        self.on_news: Callable[[], None] = lambda: None
        self.reads = 0
        """How often one was read because it was in no memory."""

    def read(self, folder: Path) -> PackedAdapter:
        """Read and check an adapter, in the thread of whoever calls. Raises what is wrong with it."""
        return self.convert(read_adapter(folder, self._facts))

    def convert(self, adapter: Adapter) -> PackedAdapter:
        """A checked adapter as it is computed with. Raises `UnsupportedAdapter`."""
        with self._device.working(), torch.no_grad():
            return self._converter.convert(adapter)

    def keep(self, hash: str, flat: PackedAdapter) -> None:
        """Have it in host memory before long."""
        self._reader.submit(self._keep, hash, flat)

    def send(self, job: LoadTask) -> None:
        """An arrival will follow."""
        self._copier.submit(self._copy, job, None)

    def arrivals(self) -> list[LoadedAdapter | str]:
        """What has come since the last time; a hash: it is in host memory now."""
        self._news.clear()
        found: list[LoadedAdapter | str] = []
        while True:
            try:
                found.append(self._arrived.get_nowait())
            except Empty:
                return found

    def wait(self, seconds: float) -> None:
        """Return when there is news, or after so long."""
        self._news.wait(seconds)

    def _say(self, news: LoadedAdapter | str) -> None:
        self._arrived.put(news)
        self._news.set()
        self.on_news()

    def _end(self, job: LoadTask, found: tuple[PackedAdapter, Tensor] | Exception) -> None:
        if isinstance(found, Exception):
            unexpected = None if isinstance(found, SymbiosisError) else found
            _log.warning("an adapter could not be brought to the device: %s", found, exc_info=unexpected)
        self._say(LoadedAdapter(job, found, time.monotonic() - job.sent))

    def _keep(self, hash: str, flat: PackedAdapter) -> None:
        try:
            self._host.release(self._host.put(hash, flat))
        except Exception:  # noqa: BLE001 - it can be read again
            _log.exception("an adapter could not be kept in host memory")
        self._say(hash)

    def _copy(self, job: LoadTask, flat: PackedAdapter | None) -> None:
        """`flat`: it was read for this, and is held."""
        try:
            flat = flat or self._host.hold(job.hash)
            if flat is None:
                self._reader.submit(self._read, job)
                return
            try:
                there = self._device.bring(flat, job.offset, job.fence)
            finally:
                self._host.release(flat)
            self._end(job, (there, self._slots.lines(there.loaded)))
        except Exception as error:  # noqa: BLE001 - somebody waits for it
            self._end(job, error)

    def _read(self, job: LoadTask) -> None:
        try:
            flat = self._host.hold(job.hash)  # perhaps it was being kept just then
            if flat is None:
                flat = self._host.put(job.hash, self._read_again(job))
            self._copier.submit(self._copy, job, flat)
        except Exception as error:  # noqa: BLE001 - somebody waits for it
            self._end(job, error)

    def _read_again(self, job: LoadTask) -> PackedAdapter:
        errors: list[SymbiosisError] = []
        for place in job.places:
            if isinstance(place, PackedAdapter):
                return place
            self.reads += 1
            try:
                flat = self.read(place)
            except SymbiosisError as error:
                errors.append(error)
                continue
            if flat.loaded.hash == job.hash:
                return flat
            errors.append(
                BadAdapter(
                    f"the files in {place.name!r} are not those of the adapter that was loaded. Load it again; new versions "
                    "belong into folders of their own, since what was accepted before may need the old one"
                )
            )
        raise errors[0]
