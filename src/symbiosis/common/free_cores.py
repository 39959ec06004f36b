"""As many compute threads as there are cores that other processes leave free.

The threads of a matrix product wait for the slowest of them. If other processes keep a core busy, one thread always waits
for a core: decoding on two cores fell to a fifth next to one busy process, with one thread less it falls by that core.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

_INTERVAL_S = 0.5
_BUSY_FIELDS = (1, 2, 3, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq


class FreeCores:
    """Within it, the calling thread computes with at most as many threads as there are free cores.

    Used by one thread. Without /proc it has no effect.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self._busy_cores = 0.0  # by other processes
        self._last = self._read() if Path("/proc/stat").exists() else (math.inf, 0.0, 0.0)
        self._max_threads = 0

    def __enter__(self) -> None:
        self._max_threads = torch.get_num_threads()
        if self._max_threads == 1:
            return
        self._measure()
        count = choose_threads(len(self._cores), self._max_threads, self._busy_cores)
        if count < self._max_threads:
            torch.set_num_threads(count)

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._max_threads:
            torch.set_num_threads(self._max_threads)

    def _measure(self) -> None:
        if self._clock() - self._last[0] < _INTERVAL_S:
            return
        now = self._read()
        seconds, busy_s, own_s = (late - early for early, late in zip(self._last, now, strict=True))
        self._last, self._busy_cores = now, max(0.0, busy_s - own_s) / seconds

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
