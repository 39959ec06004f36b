"""CPU time and memory of the server's processes."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import psutil


class ServerUsage:
    """The process of the engine, and its children: HTTP workers."""

    def __init__(self, pid: int) -> None:
        self._engine = psutil.Process(pid)

    def cpu_s(self) -> dict[str, list[float]]:
        return {"engine": [_cpu_s(self._engine)], "workers": [_cpu_s(each) for each in self._workers()]}

    def rss_bytes(self) -> dict[str, int]:
        return {"engine": _rss_bytes(self._engine), "workers": sum(_rss_bytes(each) for each in self._workers())}

    def _workers(self) -> list[psutil.Process]:
        """Without helpers of multiprocessing, which use no CPU time."""
        children = self._engine.children(recursive=True)
        return sorted((each for each in children if "symbiosis" in _command(each)), key=lambda each: each.pid)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class MemorySampler:
    """Samples the server's memory in the background. A context manager."""

    def __init__(self, usage: ServerUsage, period_s: float) -> None:
        self.samples: list[tuple[float, dict[str, int]]] = []
        """Time of `time.monotonic`, and bytes."""
        self._usage, self._period_s = usage, period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.samples.append((time.monotonic(), self._usage.rss_bytes()))

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
