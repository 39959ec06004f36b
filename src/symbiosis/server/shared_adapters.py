"""Uploaded and trained adapters of a cluster whose engines share no folder: they are artifacts of its store.

The label of an artifact has owner and name. It is written last, after an engine serves the adapter.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.errors import BadAdapter, StoreUnavailable
from symbiosis.jobs.atomic_files import map_os_errors
from symbiosis.server.adapter_store import AdapterStore, StoredAdapter, StoreLimits
from symbiosis.store.artifact_cache import LOCATION, ArtifactCache
from symbiosis.store.artifacts import ADAPTERS, ArtifactStore

_PROVIDED = "provided-"
_log = logging.getLogger("symbiosis")


def list_shared(store: ArtifactStore) -> list[StoredAdapter]:
    """Adapters with a label; of several with one name, the last. Raises `StoreUnavailable`."""
    found: dict[tuple[str | None, str], tuple[float, StoredAdapter]] = {}
    for artifact, label in store.labels(ADAPTERS).items():
        with suppress(KeyError, TypeError, ValueError):
            owner, name = _parse_name(label)
            adapter, named_at = (
                StoredAdapter(owner, name, f"{LOCATION}{artifact}", int(label["bytes"])),
                float(label["named_at"]),
            )
            if found.get((owner, name), (0.0,))[0] <= named_at:
                found[owner, name] = named_at, adapter
    return [adapter for _, adapter in found.values()]


def _parse_name(label: dict[str, Any]) -> tuple[str | None, str]:
    owner, name = label["owner"], label["name"]
    if not (owner is None or isinstance(owner, str)) or not isinstance(name, str):
        raise TypeError
    return owner, name


class SharedAdapterStore(AdapterStore):
    """Methods that read or write the store raise `StoreUnavailable`."""

    def __init__(self, cache: ArtifactCache, limits: StoreLimits) -> None:
        self.folders, self._shared = cache, cache.store
        self._provided: set[str] = set()
        """Locations that get their name soon."""
        super().__init__(Path(), limits)  # it uses no folder of this host

    def open(self) -> None:
        self._stored = {(each.owner, each.name): each for each in list_shared(self._shared)}

    def new_location(self, tag: str) -> str:
        return f"{LOCATION}{ADAPTERS}/{tag}"

    def prepare(self, owner: str | None, name: str, location: str) -> None:
        """A bucket cannot reserve the space of a label."""

    def _name(self, owner: str | None, name: str, location: str) -> StoredAdapter:
        artifact = location.removeprefix(LOCATION)
        size = self._shared.manifest(artifact).size
        self._shared.label(artifact, {"owner": owner, "name": name, "bytes": size, "named_at": time.time()})
        return StoredAdapter(owner, name, location, size)

    def discard(self, location: str) -> None:
        try:
            self._shared.remove(location.removeprefix(LOCATION))
        except StoreUnavailable as error:
            _log.warning("an adapter without a name stays in the store for now: %s", error)

    def remove(self, owner: str | None, name: str) -> bool:
        found = self._stored.get((owner, name))
        if found is None:
            return False
        self._shared.remove(found.location.removeprefix(LOCATION))  # else a restart would serve it again
        self._stored.pop((owner, name), None)
        return True

    def provide(self, name: str, folder: Path) -> str:
        """Put the folder into the store, unless it is there. Raises `BadAdapter`."""
        digest = hashlib.sha256(f"{name}\0".encode())
        for file in (CONFIG, TENSORS):
            if not (folder / file).is_file():
                raise BadAdapter(f"{file} is missing: expected a folder as PEFT's `save_pretrained` writes it")
            with map_os_errors(), (folder / file).open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        location = self.new_location(f"{_PROVIDED}{digest.hexdigest()[:32]}")
        self._provided.add(location)
        if not self._shared.has(location.removeprefix(LOCATION)):
            draft = self.folders.draft(location)
            shutil.rmtree(draft, ignore_errors=True)
            with map_os_errors():
                draft.mkdir()
                for file in (CONFIG, TENSORS):
                    shutil.copyfile(folder / file, draft / file)
            self.folders.publish(draft)
        return location

    def add_provided(self, name: str, location: str) -> None:
        self.add(None, name, location)
        self._provided.discard(location)

    def remove_garbage(self, open_jobs: Callable[[], Collection[str]]) -> None:
        """Remove adapters without a name that are neither uploads in progress nor of an open job."""
        found = self._shared.list_ids(ADAPTERS)
        jobs = tuple(f"{job}-" for job in open_jobs())  # after the list, and before what they become
        kept = {self._id(location) for location in [*self._provided, *(upload.location for upload in list(self._uploads))]}
        kept |= {self._id(each.location) for each in list(self._stored.values())}
        for id in found - kept:
            if not id.startswith(jobs):
                self.discard(self.new_location(id))

    @staticmethod
    def _id(location: str) -> str:
        return location.rpartition("/")[2]
