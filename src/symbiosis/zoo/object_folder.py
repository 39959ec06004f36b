"""Files named by the SHA-256 of their content. Each appears whole or not at all, whenever a process is killed.

objects/AB/ABCD…    content; the name is its hash
scratch/            files that are being written
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis.zoo.errors import BadZoo, ZooFull
from symbiosis.zoo.manifest import StoredObject

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE_BYTES = 1 << 22


class ObjectFolder:
    """One process writes at a time; `Zoo` has the lock."""

    def __init__(self, root: Path) -> None:
        self._objects, self._scratch = root / "objects", root / "scratch"

    def create(self) -> None:
        self._objects.mkdir(parents=True, exist_ok=True)
        self._scratch.mkdir(exist_ok=True)

    def path(self, object: StoredObject) -> Path:
        return self._objects / object.sha256[:2] / object.sha256

    def has(self, object: StoredObject) -> bool:
        path = self.path(object)
        return path.is_file() and path.stat().st_size == object.size

    def put(self, content: bytes | Path) -> StoredObject:
        """Store the content of a file, or these bytes, unless they are there. Raises `ZooFull`."""
        found = describe(content)
        if self.has(found):
            return found
        path = self.path(found)
        with self._writing() as scratch:
            with scratch.open("xb") as file:
                for piece in _pieces(content):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if isinstance(content, Path) and describe(scratch) != found:
                raise BadZoo(f"{content.name} was changed while it was read: nothing of it is stored. Try again")
            path.parent.mkdir(exist_ok=True)
            scratch.replace(path)
            sync_folder(path.parent)
            sync_folder(self._objects)
        return found

    def write_file(self, path: Path, content: bytes) -> None:
        """Replace a file of the zoo that has a name of its own."""
        with self._writing() as scratch:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            sync_folder(path.parent)

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        scratch = self._scratch / f"{secrets.token_hex(8)}.part"
        try:
            yield scratch
        except OSError as error:
            if error.errno in _FULL:
                raise ZooFull("the disk of the zoo is full: nothing of the model is in the zoo") from None
            raise BadZoo(f"the zoo cannot be written: {error.strerror}") from None
        finally:
            scratch.unlink(missing_ok=True)

    def verify(self, objects: Collection[StoredObject], progress: Callable[[int], None] = lambda size: None) -> dict[str, str]:
        """What is wrong, by hash: objects that are missing, or whose content is not that of their name."""
        wrong: dict[str, str] = {}
        for each in {each.sha256: each for each in objects}.values():
            path = self.path(each)
            if not path.is_file():
                wrong[each.sha256] = "is missing"
            elif describe(path) != each:
                wrong[each.sha256] = "was changed"
            progress(each.size)
        return wrong

    def keep_only(self, objects: Collection[StoredObject]) -> tuple[int, int]:
        """Remove all others, and what killed processes left: how many, and their bytes."""
        kept = {each.sha256 for each in objects}
        count = size = 0
        for path in [*self._objects.glob("*/*"), *self._scratch.rglob("*")]:
            if path.is_file() and (self._scratch in path.parents or path.name not in kept):
                size += path.stat().st_size
                count += 1
                path.unlink()
        for folder in self._scratch.iterdir():
            shutil.rmtree(folder)
        for folder in self._objects.iterdir():
            with contextlib.suppress(OSError):
                folder.rmdir()  # those that are empty
        return count, size


def describe(content: bytes | Path) -> StoredObject:
    digest, size = hashlib.sha256(), 0
    for piece in _pieces(content):
        digest.update(piece)
        size += len(piece)
    return StoredObject(digest.hexdigest(), size)


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
