"""Uploaded and trained adapters on disk: a folder each, with PEFT's two files and `served.json` (owner and name).

`served.json` gets its name last, after the engine serves the adapter; its content is on disk before, so that a full disk ends
an upload before anything is served. A folder without it is an incomplete upload and is removed at the next start. Imports no
web framework: the engine's process reads the store at its start.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.errors import QuotaExceeded, SymbiosisError, TooManyRequests
from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk, write_atomic
from symbiosis.store.artifact_folders import ArtifactFolders, LocalFolders

METADATA = "served.json"
_PREPARED = "served.json.new"
FIELDS = {"config": CONFIG, "weights": TENSORS}
"""Form fields of an upload and their files."""
_MAX_UPLOADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """Quota of each owner: a tenant, or the admin, whose adapters are shared."""

    adapters: int = 64
    bytes: int = 4 << 30
    """All adapters of the owner together."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    owner: str | None
    name: str
    location: str
    """For the engine: here a folder (`store.artifact_folders`)."""
    bytes: int


def lock_folder(folder: Path, what: str = "adapters", option: str = "--uploads") -> int:
    """Lock the folder of `what` while the returned descriptor is open. Raises `SymbiosisError`."""
    hint = f"choose another with {option} FOLDER"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SymbiosisError(f"{folder} cannot store {what}: {error.strerror}; {hint}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):  # some network file systems have no locks
            raise SymbiosisError(f"{folder} cannot store {what}: it cannot be locked: {error.strerror}; {hint}") from None
        raise SymbiosisError(f"{folder} cannot store {what}: it is in use by another server: stop it, or {hint}") from None
    return handle


def list_stored(folder: Path) -> list[StoredAdapter]:
    """Adapters with readable metadata."""
    found: list[StoredAdapter] = []
    for path in sorted(folder.glob(f"*/{METADATA}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            metadata = json.loads(path.read_text())
            found.append(StoredAdapter(metadata["owner"], str(metadata["name"]), str(path.parent), _size(path.parent)))
    return found


def remove_incomplete(folder: Path) -> None:
    """Remove uploads without metadata; other content is left alone."""
    for upload in folder.glob("upload-*"):
        if not (upload / METADATA).exists():
            shutil.rmtree(upload, ignore_errors=True)


def remove_abandoned(parent: Path, pattern: str) -> None:
    """Remove this user's folders that no server has locked: their server was killed."""
    for folder in parent.glob(pattern):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            with suppress(SymbiosisError):
                handle = lock_folder(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)


class AdapterStore:
    """One per server. Empty before `open`."""

    folders: ArtifactFolders = LocalFolders()

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self._folder, self._limits = folder, limits
        self._stored: dict[tuple[str | None, str], StoredAdapter] = {}
        self._uploads: list[AdapterUpload] = []

    def open(self) -> None:
        """Read what is stored."""
        remove_incomplete(self._folder)  # of a killed HTTP process
        self._stored = {(each.owner, each.name): each for each in list_stored(self._folder)}

    def open_upload(self, owner: str | None, name: str) -> AdapterUpload:
        """Raises `TooManyRequests`."""
        active = [upload for upload in self._uploads if upload.owner == owner]
        if len(active) >= _MAX_UPLOADS or any(upload.name == name for upload in active):
            raise TooManyRequests(f"{len(active)} uploads in progress, at most {_MAX_UPLOADS}, one per name. Try again later")
        upload = AdapterUpload(self, self.new_location(secrets.token_hex(12)), owner, name)
        self._uploads.append(upload)
        return upload

    def new_location(self, tag: str) -> str:
        """The location of a new adapter. The next start removes it unless `add` is called."""
        return str(self._folder / f"upload-{tag}")

    def prepare(self, owner: str | None, name: str, location: str) -> None:
        """Write what `add` would write. Raises `StorageFull`."""
        write_atomic(Path(location) / _PREPARED, json.dumps({"owner": owner, "name": name}).encode())

    def add(self, owner: str | None, name: str, location: str) -> None:
        """Store an adapter that the engine serves, in place of an older one of that name. Durable on return."""
        adapter, replaced = self._name(owner, name, location), self._stored.get((owner, name))
        self._stored[owner, name] = adapter
        if replaced is not None and replaced.location != location:
            self.discard(replaced.location)

    def _name(self, owner: str | None, name: str, location: str) -> StoredAdapter:
        """Give the files at a location their name."""
        folder = Path(location)
        if not (folder / _PREPARED).exists():
            self.prepare(owner, name, location)
        with map_os_errors():
            adapter = StoredAdapter(owner, name, location, _size(folder))
            (folder / _PREPARED).rename(folder / METADATA)
            sync_to_disk(folder)
            sync_to_disk(folder.parent)
        return adapter

    def discard(self, location: str) -> None:
        """Remove files that no name refers to."""
        shutil.rmtree(location, ignore_errors=True)

    def provide(self, name: str, folder: Path) -> str:
        """The location for the engine of a folder of the provider, which is to be served under this name."""
        return str(folder)

    def add_provided(self, name: str, location: str) -> None:
        """An adapter of the provider is served under this name: it replaces what was stored."""
        self.remove(None, name)

    def remove_garbage(self, open_jobs: Callable[[], Collection[str]]) -> None:
        """Remove what a shared store has of neither open jobs nor named adapters: here the next start does."""

    @property
    def stored(self) -> list[StoredAdapter]:
        return list(self._stored.values())

    def get(self, owner: str | None, name: str) -> StoredAdapter | None:
        return self._stored.get((owner, name))

    def has(self, owner: str | None, name: str) -> bool:
        """Whether the name is stored or being uploaded."""
        return (owner, name) in self._stored or any((each.owner, each.name) == (owner, name) for each in list(self._uploads))

    def remove(self, owner: str | None, name: str) -> bool:
        """False if it is not stored here."""
        found = self._stored.pop((owner, name), None)
        if found is not None:
            self.discard(found.location)
        return found is not None

    def check_count(self, owner: str | None, expected: int) -> None:
        """Uploads in progress and `expected` adapters of open jobs count too. Raises `QuotaExceeded`."""
        names = {each.name for each in self._list_owned(owner)}
        names |= {upload.name for upload in list(self._uploads) if upload.owner == owner}
        stored, most = len(names), self._limits.adapters
        if stored + expected > most:
            hint = "remove an adapter or cancel a job"
            raise QuotaExceeded(f"adapter quota exceeded: {stored} stored + {expected} of open jobs > {most} allowed: {hint}")

    def check_bytes(self, owner: str | None) -> None:
        """Raises `QuotaExceeded` if the owner's quota is used up. The size of a new adapter is not known yet."""
        if self._sum_bytes(owner) >= self._limits.bytes:
            raise QuotaExceeded(f"adapter quota of {self._limits.bytes} bytes used up: remove an adapter")

    def check_upload(self, upload: AdapterUpload) -> None:
        """A replaced adapter counts too: both exist for a moment. Raises `QuotaExceeded`."""
        used = self._sum_bytes(upload.owner) + sum(each.bytes for each in self._uploads if each.owner == upload.owner)
        if used > self._limits.bytes:
            raise QuotaExceeded(f"adapter quota exceeded: {used} bytes > {self._limits.bytes} allowed: remove an adapter")

    def close_upload(self, upload: AdapterUpload) -> None:
        self._uploads.remove(upload)

    def _list_owned(self, owner: str | None) -> list[StoredAdapter]:
        return [each for each in list(self._stored.values()) if each.owner == owner]  # other threads may add meanwhile

    def _sum_bytes(self, owner: str | None) -> int:
        return sum(each.bytes for each in self._list_owned(owner))


class AdapterUpload:
    """An adapter being uploaded. Ends with `commit` or `abort`. Methods raise `StorageFull` if the disk is full."""

    def __init__(self, store: AdapterStore, location: str, owner: str | None, name: str) -> None:
        self.location, self.owner, self.name, self.bytes = location, owner, name, 0
        self._store, self._folder, self._is_published = store, store.folders.draft(location), False
        self._files: dict[str, BinaryIO] = {}
        with map_os_errors():
            self._folder.mkdir(mode=0o700)

    def write(self, field: str, chunk: bytes) -> None:
        """Raises `QuotaExceeded`, or `SymbiosisError` if the disk fails."""
        self.bytes += len(chunk)
        self._store.check_upload(self)
        with map_os_errors():
            if field not in self._files:
                self._files[field] = (self._folder / FIELDS[field]).open("xb")
            self._files[field].write(chunk)

    def sync(self) -> None:
        """All but the name of its metadata is on disk, or in the cluster's store, then. Raises `StoreUnavailable`."""
        with map_os_errors():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
        self._store.folders.publish(self._folder)
        self._is_published = True
        self._store.prepare(self.owner, self.name, self.location)

    def commit(self) -> None:
        """Store the adapter, which the engine serves now."""
        self._store.add(self.owner, self.name, self.location)
        self._store.close_upload(self)

    def abort(self) -> None:
        self._store.close_upload(self)
        for file in self._files.values():
            with suppress(OSError):  # what it has buffered does not fit on the disk either
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._is_published:
            self._store.discard(self.location)


def _size(folder: Path) -> int:
    return sum((folder / file).stat().st_size for file in FIELDS.values())
