"""Keeps engines running: as many as the director wants, each in a process of its own."""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from symbiosis.app.child_process import wait_or_kill
from symbiosis.errors import EngineLost

_MIN_UPTIME_S, _MAX_FAILURES = 60.0, 3
_BACKOFF_S = 1.0
_STOP_TIMEOUT_S = 30.0
_REFUSED = 2
"""Exit status of an engine that the cluster does not take."""
_log = logging.getLogger("symbiosis")


class EngineLauncher(Protocol):
    """Starts engines on some kind of resource. Each joins the director by itself."""

    def keep(self, wanted: int, leave: Collection[str], hung: Collection[str] = ()) -> None:
        """Stop the engines in `leave`, kill those in `hung`, and keep so many others running. Called often."""

    def check(self) -> None:
        """Replace engines that have died. Raises `EngineLost` if they keep dying at their start."""

    def close(self) -> None:
        """Stop all engines."""


class EngineProcesses:
    """Engines as processes of this host. `config` is that of `app.engine_process`, without a name."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "engine") -> None:
        self._config, self._prefix = dict(config), prefix
        self._processes: dict[str, _EngineProcess] = {}
        self._leaving: list[_EngineProcess] = []
        self._wanted = 0
        self._failures = 0
        self._not_before = 0.0

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def keep(self, wanted: int, leave: Collection[str], hung: Collection[str] = ()) -> None:
        self._wanted = wanted
        for name in [name for name in hung if name in self._processes]:
            _log.warning("the engine %s does not answer: starting another", name)
            process = self._processes.pop(name)
            process.kill()
            self._leaving.append(process)
        for name in [name for name in leave if name in self._processes]:
            process = self._processes.pop(name)
            process.terminate()
            self._leaving.append(process)
        self.check()

    def check(self) -> None:
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[name]
            if status == _REFUSED:
                raise EngineLost(f"the cluster does not take the engine {name}: see the log above")
            if status > 0:  # by itself, and not by a signal
                self._failures = self._failures + 1 if time.monotonic() - process.started < _MIN_UPTIME_S else 1
                self._not_before = time.monotonic() + _BACKOFF_S
                if self._failures >= _MAX_FAILURES:
                    raise EngineLost(f"engines failed {_MAX_FAILURES} times at their start: see the log above")
            _log.warning("the engine %s has ended: starting another", name)
        self._leaving = [process for process in self._leaving if process.poll() is None]
        while len(self._processes) < self._wanted and time.monotonic() >= self._not_before:
            name = f"{self._prefix}-{secrets.token_hex(4)}"
            self._processes[name] = _EngineProcess({**self._config, "name": name})

    def close(self) -> None:
        everything = [*self._processes.values(), *self._leaving]
        for process in everything:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in everything:
            process.wait(deadline)


class _EngineProcess:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "symbiosis.app.engine_process"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(config).encode() + b"\n")
            self._process.stdin.flush()  # it stays open: the engine ends when it closes
        except OSError:
            _log.warning("an engine did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, deadline: float) -> None:
        """Kill it at the deadline."""
        wait_or_kill(self._process, deadline - time.monotonic())
