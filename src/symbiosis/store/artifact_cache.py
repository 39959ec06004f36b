"""Artifacts of a store in a local folder of bounded size, shared by the processes of a node.

artifacts/NAME/            an artifact, with its manifest; `+` stands for the slashes of its name
draft-…/                   what one process writes or reads into it; locked while the process lives

A folder gets its name when it is complete. A process that reads it holds a shared lock on the manifest, and eviction, the
least recently used first, needs an exclusive one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from symbiosis.errors import DoesNotFit, StoreUnavailable, SymbiosisError
from symbiosis.store.artifacts import MANIFEST, ArtifactStore, Manifest, check_file, check_folder, check_name
from symbiosis.store.store_url import open_object_store

LOCATION = "store:"
_ARTIFACTS = "artifacts"
_DRAFT = "draft-"
_SLASH = "+"  # not in a name
_RETRY_S, _MAX_RETRY_S = 1.0, 15.0
_LOG_S = 60.0
_ATTEMPTS = 5
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("symbiosis")


class ArtifactCache:
    """`ArtifactFolders` over a store. Several processes may use the same folder."""

    def __init__(self, store: ArtifactStore, folder: Path, max_bytes: int) -> None:
        """Raises `StoreUnavailable` if the folder cannot be used."""
        self.store = store
        self._root, self._max_bytes = folder / _ARTIFACTS, max_bytes
        with _mapping():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_abandoned(folder)
            self._drafts, self._lock = _make_locked_folder(folder)

    def close(self) -> None:
        """Remove drafts. The cached artifacts stay."""
        shutil.rmtree(self._drafts, ignore_errors=True)
        os.close(self._lock)

    def find(self, location: str) -> Path:
        if not location.startswith(LOCATION):
            return Path(location)  # of the provider, such as a test's
        name, file = _split(location.removeprefix(LOCATION))
        return self._folder(name) / file if file else self._folder(name)

    def _folder(self, name: str) -> Path:
        return self._root / name.replace("/", _SLASH)

    def locate(self, folder: Path) -> str:
        if not folder.is_relative_to(self._root):
            return str(folder)
        return f"{LOCATION}{str(folder.relative_to(self._root)).replace(_SLASH, '/')}"

    def draft(self, location: str) -> Path:
        """`location` may also be the folder of several artifacts: those of a run."""
        if not location.startswith(LOCATION):
            return Path(location)
        folder = self._drafts / check_folder(location.removeprefix(LOCATION))
        with _mapping():
            folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def hold(self, path: Path) -> Iterator[Path]:
        if not path.is_relative_to(self._root):
            yield path
            return
        name, _ = _split(self.locate(path).removeprefix(LOCATION))
        handle = self._acquire(name)
        try:
            yield path
        finally:
            os.close(handle)  # the lock, too

    def publish(self, folder: Path, interrupt: threading.Event | None = None) -> Path:
        if not folder.is_relative_to(self._drafts):
            return folder
        name = check_name(str(folder.relative_to(self._drafts)))
        manifest = self._put(name, folder, interrupt)
        with suppress(StoreUnavailable, DoesNotFit):  # it is in the store
            if (handle := self._keep(name, folder, manifest)) is not None:
                os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)
        return self._folder(name)

    def _put(self, name: str, folder: Path, interrupt: threading.Event | None) -> Manifest:
        delay_s, last_log_s = _RETRY_S, 0.0
        while True:
            try:
                return self.store.put(name, folder)
            except StoreUnavailable as error:
                if interrupt is None or interrupt.is_set():
                    raise
                if time.monotonic() - last_log_s >= _LOG_S:
                    last_log_s = time.monotonic()
                    _log.warning("%s waits for the store: %s", name, error)
            interrupt.wait(delay_s)  # if it is set meanwhile, the store is tried one last time
            delay_s = min(2 * delay_s, _MAX_RETRY_S)

    # The local folder

    def _acquire(self, name: str) -> int:
        """A descriptor with a shared lock on a cached artifact, which is fetched if it is not there."""
        for _ in range(_ATTEMPTS):
            if (handle := self._try_acquire(name)) is not None:
                return handle
            draft = Path(tempfile.mkdtemp(prefix="fetch-", dir=self._drafts)) / "artifact"
            try:
                with _mapping():
                    self._make_room(self.store.manifest(name).size)
                    handle = self._keep(name, draft, self.store.fetch(name, draft))
                if handle is not None:
                    return handle
            finally:
                shutil.rmtree(draft.parent, ignore_errors=True)
        raise StoreUnavailable(f"{name} does not stay in the cache of this host: raise --store-cache-gb")

    def _try_acquire(self, name: str) -> int | None:
        file = self._folder(name) / MANIFEST
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_current(handle, file) and self._is_whole(file):
            os.utime(file)  # least recently used first
            return handle
        os.close(handle)
        return None

    def _is_whole(self, file: Path) -> bool:
        """Files have their sizes: after a crash of the host they may not. Otherwise the artifact is removed here."""
        with suppress(OSError, SymbiosisError):
            files = Manifest.decode(file.read_bytes()).files
            if all((file.parent / name).stat().st_size == each.bytes for name, each in files.items()):
                return True
        shutil.rmtree(file.parent, ignore_errors=True)
        return False

    def _keep(self, name: str, folder: Path, manifest: Manifest) -> int | None:
        """Move a complete folder into the cache. A descriptor with its lock; None: another process was first."""
        with _mapping():
            self._make_room(manifest.size)
            (folder / MANIFEST).write_bytes(manifest.encode())
            handle = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH)  # before others can evict it
                folder.rename(self._folder(name))
            except OSError as error:
                os.close(handle)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return None
            return handle

    def _make_room(self, needed: int) -> None:
        """Raises `DoesNotFit` if so much never fits."""
        if needed > self._max_bytes:
            raise DoesNotFit(
                f"the cache of this host has {self._max_bytes} bytes, an artifact needs {needed}: raise --store-cache-gb"
            )
        entries = sorted(self._entries())
        used = sum(size for _, size, _ in entries)
        for _, size, file in entries:
            if used + needed <= self._max_bytes:
                return
            if self._evict(file):
                used -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and manifest of each artifact."""
        for folder in list(os.scandir(self._root)):
            with suppress(OSError):  # another process evicts it
                file, size = Path(folder) / MANIFEST, sum(entry.stat().st_size for entry in os.scandir(folder))
                yield file.stat().st_mtime, size, file

    def _evict(self, file: Path) -> bool:
        """False if it is in use, or another process was first."""
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_current(handle, file):
                return False
            trash = Path(tempfile.mkdtemp(prefix="evicted-", dir=self._drafts))
            file.parent.rename(trash / "artifact")
            shutil.rmtree(trash, ignore_errors=True)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """A store, and its cache on this host."""

    url: str
    folder: str
    """Caches of all stores."""
    max_bytes: int

    def open(self) -> ArtifactCache:
        """Raises `BadAddress` or `StoreUnavailable`. The store itself is not used yet."""
        folder = Path(self.folder) / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return ArtifactCache(ArtifactStore(open_object_store(self.url)), folder, self.max_bytes)


def _split(name: str) -> tuple[str, str]:
    """Name of an artifact, and a file of it or nothing. Raises `BadArtifact`."""
    folder, _, file = name.rpartition("/")
    if "." in file:
        return check_name(folder), check_file(file)
    return check_name(name), ""


def _is_current(handle: int, file: Path) -> bool:
    """Whether the opened file still has its name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def _make_locked_folder(parent: Path) -> tuple[Path, int]:
    """For drafts. Another process may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=parent))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(handle, fcntl.LOCK_SH)
            if _is_current(handle, folder):
                return folder, handle
            os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Drafts of killed processes."""
    for draft in folder.glob(f"{_DRAFT}*"):
        with suppress(OSError):
            handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft, ignore_errors=True)
            finally:
                os.close(handle)


@contextmanager
def _mapping() -> Iterator[None]:
    """Errors of the local folder, without its path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreUnavailable(
                "the disk of this host is full: expected space for the cache of the store. Free some, or lower --store-cache-gb"
            ) from None
        raise StoreUnavailable(f"the cache of the store cannot be used on this host: {error.strerror}") from None
