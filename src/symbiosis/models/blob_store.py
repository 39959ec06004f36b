"""The cache folder of this host: the default model, and blobs named by the hash of their content.

The whole folder can be deleted at any time; its content is fetched or built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis.errors import SymbiosisError
from symbiosis.types import BlobRef


class UnwritableCache(SymbiosisError):
    """The cache folder cannot be written to."""

    code = "unwritable_cache"


def root() -> Path:
    """The cache folder: `SYMBIOSIS_CACHE`, or the user's cache folder."""
    named = os.environ.get("SYMBIOSIS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "symbiosis"


@contextmanager
def writing() -> Iterator[None]:
    """Raise `UnwritableCache` for an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise UnwritableCache(
            f"cannot write to the cache {root()}: {error.strerror or error}; "
            "expected a folder that you can write to: name one with SYMBIOSIS_CACHE=FOLDER"
        ) from None


def check_writable() -> None:
    """Raises `UnwritableCache` if no file can be created in the cache folder."""
    with new_file(root()) as path, writing():
        path.touch()


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock among all processes of this host. Raises `UnwritableCache`."""
    with writing():
        root().mkdir(parents=True, exist_ok=True)
        file = (root() / f"{name}.lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def blob_path(ref: BlobRef) -> Path:
    return root() / "blobs" / ref.sha256


def has_blob(ref: BlobRef) -> bool:
    path = blob_path(ref)
    return path.is_file() and path.stat().st_size == ref.size


@contextmanager
def new_file(folder: Path) -> Iterator[Path]:
    """A private path in `folder` to write to; removed at the end unless it was moved. Raises `UnwritableCache`."""
    with writing():
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{os.getpid()}-{os.urandom(6).hex()}.part"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def hash_file(path: Path) -> BlobRef:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BlobRef(sha256=digest, size=path.stat().st_size)


def adopt(path: Path) -> BlobRef:
    """Move a finished file into the blob store under its hash."""
    ref = hash_file(path)
    blob_path(ref).parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, blob_path(ref))
    return ref
