"""Where a process finds the files of adapters, data sets and checkpoints: plain folders, or a cluster's store.

A *location* is the text for it that processes exchange: a path that all of them have, or `store:` and the name of an artifact.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol


class ArtifactFolders(Protocol):
    """Thread-safe."""

    def find(self, location: str) -> Path:
        """The local folder, or file, of a location. Its content is there within `hold`. Raises `BadArtifact`."""

    def hold(self, path: Path) -> AbstractContextManager[Path]:
        """The content is there within the context. Raises `StoreUnavailable`, `BadArtifact` or `DoesNotFit`."""

    def draft(self, location: str) -> Path:
        """The local folder to write to before `publish`. Raises `BadArtifact`."""

    def publish(self, folder: Path, interrupt: threading.Event | None = None) -> Path:
        """Make a written folder available to all processes. Returns the folder to find it in from now on.

        With `interrupt` it is tried again while the store is unavailable, until that is set. Raises `StoreUnavailable`.
        """

    def locate(self, folder: Path) -> str:
        """The location of a folder that `find` or `publish` returned."""


class LocalFolders:
    """Locations are paths."""

    def find(self, location: str) -> Path:
        return Path(location)

    def hold(self, path: Path) -> AbstractContextManager[Path]:
        return nullcontext(path)

    def draft(self, location: str) -> Path:
        return Path(location)

    def publish(self, folder: Path, interrupt: threading.Event | None = None) -> Path:
        return folder

    def locate(self, folder: Path) -> str:
        return str(folder)
