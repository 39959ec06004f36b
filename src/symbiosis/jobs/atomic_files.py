"""Durable, all-or-nothing file writes."""

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
def map_os_errors() -> Iterator[None]:
    """Turn `OSError` into `StorageFull` or `SymbiosisError`, without the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull("the server's disk is full: nothing was stored. Try again later, or tell the provider") from None
        raise SymbiosisError(f"the server's disk failed: {error.strerror}") from None


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes) -> None:
    """Raises `StorageFull`."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with map_os_errors():
        try:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            sync_to_disk(path.parent)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
