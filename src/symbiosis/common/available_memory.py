"""Memory of this machine that new allocations can use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes, without swapping. The limit of a container counts; pages of files that it has read can be reclaimed."""
    available = _read_meminfo()
    limit, used = (_read_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - max(0, used - _read_file_pages())))


def _read_file_pages() -> int:
    """Bytes of pages that the container's files have in memory."""
    try:
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(fields["active_file"]) + int(fields["inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0


def _read_meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_number(path: Path) -> int | None:
    """None if there is none, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
