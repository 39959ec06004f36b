"""Memory of a group of processes, with shared pages counted once.

Resident sets cannot be added: processes share the pages of the files that they map, such as libraries and the checkpoint.
Pages without a file belong to one process and are added. Of a file, the largest part that one process has in memory counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes in memory."""

    own: int = 0
    """Pages of one process each."""
    files: int = 0
    """Pages of mapped files, each file once."""

    @property
    def total(self) -> int:
        return self.own + self.files

    def times(self, count: int) -> ProcessMemory:
        """The memory of `count` processes like this one: they share the files."""
        return ProcessMemory(self.own * count, self.files)

    def plus(self, other: ProcessMemory) -> ProcessMemory:
        """The memory of both, of which one maps the files of the other."""
        return ProcessMemory(self.own + other.own, max(self.files, other.files))


def measure_processes(ids: Iterable[int]) -> ProcessMemory:
    """The memory of these processes now; those that have exited have none."""
    own, files = 0, dict[str, int]()
    for id in ids:
        try:
            text = Path(f"/proc/{id}/smaps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        anonymous, mapped = _parse_mappings(text)
        own += anonymous
        for path, size in mapped.items():
            files[path] = max(files.get(path, 0), size)
    return ProcessMemory(own, sum(files.values()))


def _parse_mappings(smaps: str) -> tuple[int, dict[str, int]]:
    """Bytes without a file, and bytes of each file."""
    own, files, path, resident = 0, dict[str, int](), "", 0
    for line in smaps.splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
        elif line.startswith("Anonymous:"):
            anonymous = int(line.split()[1]) << 10
            own += anonymous if path.startswith("/") else resident
            if path.startswith("/"):
                files[path] = files.get(path, 0) + resident - anonymous
        elif (header := _MAPPING.fullmatch(line)) is not None:
            path = header[1]
    return own, files


def descendants(id: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has exited
    found = [id]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
