"""Memory of processes by part, on their device and on the host."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROWTH = {"tenant": 24 << 20, "executor": 34 << 20, "shard": 60 << 20, "engine": 60 << 20, "http": 10 << 20}
"""By role: what is loaded after the imports, such as oneDNN and thread stacks. Measured with models of no size."""
_TOKENIZER_FACTOR = 12.5
"""A loaded tokenizer, relative to its tokenizer.json."""
_FALLBACK = 380 << 20  # where the system has no /proc
_HEAP_SHARE = 0.5
"""Of a split tenant's tensors, what holes in the heap take besides. Measured: 0.25 to 0.8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEstimate:
    """The peak memory of a process. Parts of `count` equal processes are those of one."""

    role: str
    device: str
    """Where its tensors are: cpu, cuda:0 …"""
    parts: Mapping[str, int]
    """Bytes on that device."""
    host_parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes in the host's memory, if the device is a GPU."""
    count: int = 1
    remote: bool = False
    """On another host."""
    loading: int = 0
    """Bytes in the host's memory only while it loads; the processes of a host load one after the other."""

    @property
    def total(self) -> int:
        """Bytes of one process on its device, once it has loaded."""
        return sum(self.parts.values())

    @property
    def peak(self) -> int:
        """Bytes of one process in its host's memory at its highest."""
        return self.host_total + self.loading

    @property
    def host_total(self) -> int:
        """Bytes of one process in its host's memory."""
        return self.total if self.device == "cpu" else sum(self.host_parts.values())


def read_resident() -> int:
    """Bytes of this process in memory now."""
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return _FALLBACK
    return int(lines["VmRSS"].split()[0]) << 10


def heap_share() -> float:
    """Of a split tenant's tensors in host memory: holes that freed tensors leave.

    glibc before 2.38 looks for more room than an aligned block needs: the hole of a tensor is too small for the next one of its
    size. Where every block is mapped (MALLOC_MMAP_THRESHOLD_), tensors take what the dry run counts.
    """
    library, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return _HEAP_SHARE if library == "glibc" and numbers < (2, 38) else 0.0


def tokenizer_bytes(source: Any) -> int:
    """Of a loaded tokenizer; 0 if the model has none in a folder of this machine."""
    try:
        return int(_TOKENIZER_FACTOR * (Path(str(source)) / "tokenizer.json").stat().st_size)
    except OSError:
        return 0


def sum_on(processes: Iterable[ProcessEstimate], device: str) -> int:
    """Bytes that processes of this host take on a device."""
    here = [process for process in processes if not process.remote]
    total = max((process.loading for process in here), default=0) if device == "cpu" else 0
    for process in here:
        if process.device == device:
            total += process.count * process.total
        elif device == "cpu":
            total += process.count * process.host_total
    return total
