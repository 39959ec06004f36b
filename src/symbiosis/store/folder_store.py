"""Objects as files of a folder that the nodes share. A file is written under another name, synced, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from symbiosis.errors import StoreFull, StoreUnavailable
from symbiosis.store.object_store import PART_BYTES

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NONE = (errno.ENOENT, errno.ENOTDIR)
_PART = ".part"


class FolderStore:
    """An `ObjectStore`. The folder itself is never made here: without its mount, a shared folder is missing or empty."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, content: bytes | Path) -> None:
        path = self._root / name
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_PART}")
        with _mapping():
            if not self._root.is_dir():
                raise StoreUnavailable("the store's folder is not there: expected one that exists. Create it, or mount it here")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with scratch.open("xb") as file:
                    if isinstance(content, bytes):
                        file.write(content)
                    else:
                        with content.open("rb") as source:
                            shutil.copyfileobj(source, file, PART_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                scratch.replace(path)
                self._sync_folders(path.parent)
            except FileNotFoundError as error:
                raise StoreUnavailable(f"the store's folder has changed while it was written: {error.strerror}") from None
            except BaseException:
                with suppress(OSError):
                    scratch.unlink(missing_ok=True)
                raise

    def _sync_folders(self, folder: Path) -> None:
        """The entries of a new file and of new folders."""
        while folder != self._root.parent:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            folder = folder.parent

    def read(self, name: str, max_bytes: int) -> Iterator[bytes]:
        with _mapping():
            try:  # non-blocking: opening a pipe without a writer must not wait
                handle = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise FileNotFoundError(name) from None if error.errno in (*_NONE, errno.ELOOP) else error
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise FileNotFoundError(name)
                while max_bytes > 0 and (part := file.read(min(PART_BYTES, max_bytes))):
                    max_bytes -= len(part)
                    yield part

    def exists(self, name: str) -> bool:
        with _mapping():
            return (self._root / name).is_file()

    def list(self, folder: str) -> list[str]:
        with _mapping():
            names = []
            for parent, _, files in os.walk(self._root / folder, onerror=_raise_unless_missing):
                names += [str((Path(parent) / file).relative_to(self._root)) for file in files if not file.endswith(_PART)]
            return names

    def remove(self, name: str) -> None:
        path = self._root / name
        with _mapping(), suppress(FileNotFoundError):  # another process may remove it, too
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in _NONE:
        raise error


@contextmanager
def _mapping() -> Iterator[None]:
    """Messages without the path: tenants see them."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull("the store is full: nothing was written. Try again later, or tell the provider") from None
        if error.errno in _FORBIDDEN:
            raise StoreUnavailable(
                f"the store is read-only for this process ({error.strerror}): expected a folder that it may read and write"
            ) from None
        raise StoreUnavailable(f"the store cannot be used ({error.strerror}): expected a folder that works") from None
