"""Memory of this machine that new allocations can use."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes, without swapping. The limit of a container counts."""
    available = _read_meminfo()
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


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
