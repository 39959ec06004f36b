"""Files that are there whole, and on the disk, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.errors import StorageFull

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def told() -> Iterator[None]:
    """What the disk refuses becomes an error of ours, which names no path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull("the server's disk is full: nothing was kept. Try again later, or tell the provider") from None
        raise SymbiosisError(f"the server's disk fails: {error.strerror}") from None


def to_disk(path: Path) -> None:
    """A file, or what a folder lists."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def written(path: Path, content: bytes) -> None:
    """Raises `StorageFull`."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with told():
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            to_disk(path.parent)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
