"""As many compute threads as there are cores that other processes leave free.

The threads of a matrix product wait for the slowest of them. If other processes keep a core busy, one thread always waits
for a core: decoding on two cores fell to a fifth next to one busy process, with one thread less it falls by that core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

_INTERVAL_S = 0.5
_BUSY_FIELDS = (1, 2, 3, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq


class ThreadCount:
    """Sets torch's number of threads for the calling thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """No more threads than now; always those without /proc."""
        self._max_threads, self._clock = torch.get_num_threads(), clock
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self._is_active = self._max_threads > 1 and Path("/proc/stat").exists()
        self._last = self._read() if self._is_active else (0.0, 0.0, 0.0)

    def adjust(self) -> None:
        """Quick: call it before each computation."""
        if not self._is_active or self._clock() - self._last[0] < _INTERVAL_S:
            return
        now = self._read()
        seconds, busy_s, own_s = (late - early for early, late in zip(self._last, now, strict=True))
        self._last = now
        count = choose_threads(len(self._cores), self._max_threads, max(0.0, busy_s - own_s) / seconds)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    def _read(self) -> tuple[float, float, float]:
        """The time, and seconds of processor time of everything on our cores and of this process."""
        own = os.times()
        return self._clock(), parse_busy_s(Path("/proc/stat").read_text(), self._cores), own.user + own.system


def choose_threads(num_cores: int, max_threads: int, busy_cores: float) -> int:
    """`busy_cores` is what other processes use."""
    return max(1, min(max_threads, round(num_cores - busy_cores)))


def parse_busy_s(stat: str, cores: Collection[int]) -> float:
    """Seconds that these cores were busy since the start of the machine, by the text of /proc/stat."""
    wanted = {f"cpu{core}" for core in cores}
    fields = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    ticks = sum(int(line[index]) for line in fields if line[0] in wanted for index in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")
