"""Where a store keeps its objects: a folder, or a bucket. Names of objects are relative paths that this package chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

PART_BYTES = 8 << 20
"""An object is read in parts of this size."""


class ObjectStore(Protocol):
    """Objects by name. Thread-safe.

    An object appears whole or not at all, and is never changed. Every method raises `StoreUnavailable` if the store cannot be
    reached, or does not permit the operation.
    """

    def write(self, name: str, content: bytes | Path) -> None:
        """Durable on return. Raises `StoreFull`."""

    def read(self, name: str, max_bytes: int) -> Iterator[bytes]:
        """The first `max_bytes` in parts. Raises `FileNotFoundError` before the first part."""

    def exists(self, name: str) -> bool: ...

    def list(self, folder: str) -> list[str]:
        """Names of all objects below a folder."""

    def remove(self, name: str) -> None:
        """An object, or everything below a folder. No effect if there is none."""
