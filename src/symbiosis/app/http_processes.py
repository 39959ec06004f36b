"""The HTTP processes of a server: started, configured, replaced when they die, stopped."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from symbiosis.app.child_process import wait_or_kill
from symbiosis.errors import EngineLost, SymbiosisError
from symbiosis.server.connections.shared_counts import create_counts

_STOP_TIMEOUT_S = 40.0
_MIN_UPTIME_S, _MAX_DEATHS = 30.0, 3
_MAX_WORKERS = 64
_BACKLOG = 2048
_log = logging.getLogger("symbiosis")


class HttpProcesses:
    """`workers` processes share the listening socket. More than one need a control process, which owns all state.

    Each starts at once and serves after `configure`. Their sockets are inherited: a new process can replace a dead one.
    """

    def __init__(self, listening: socket.socket, workers: int, folder: Path, shutdown_delay_s: float = 0.0) -> None:
        """`folder` is private to this user. At `stop` they serve for `shutdown_delay_s` as before, without being ready."""
        if not 1 <= workers <= _MAX_WORKERS:
            raise SymbiosisError(f"{workers} HTTP workers: expected 1 to {_MAX_WORKERS}")
        self._config: dict[str, Any] = {}
        self._control_path: Path | None = None
        self._control_socket: socket.socket | None = None
        self._counts_fd: int | None = None
        self._shutdown_delay_s = shutdown_delay_s
        self._slots: list[_Slot] = []
        try:
            if workers == 1:
                self._slots.append(_Slot(listening.fileno(), shutdown_delay_s))
            else:
                self._start_several(listening.fileno(), workers, folder)
        except BaseException:
            self.stop()
            raise

    def _start_several(self, fd: int, workers: int, folder: Path) -> None:
        self._control_path = folder / f"control-{os.getpid()}-{secrets.token_hex(4)}"
        self._control_socket = socket.socket(socket.AF_UNIX)
        self._control_socket.bind(str(self._control_path))
        self._control_socket.listen(_BACKLOG)
        self._counts_fd = create_counts()
        self._slots.append(_Slot(self._control_socket.fileno(), 0.0))
        for own in range(workers):
            counts = {"fd": self._counts_fd, "own": own, "workers": workers}
            self._slots.append(_Slot(fd, self._shutdown_delay_s, str(self._control_path), counts))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def pids(self) -> list[int]:
        """The control process first."""
        return [slot.process.pid for slot in self._slots]

    def configure(self, config: dict[str, Any]) -> None:
        """Send the configuration; the processes serve from then on."""
        self._config = config
        for slot in self._slots:
            slot.process.configure(config)

    def are_alive(self) -> bool:
        return all(slot.process.is_alive() for slot in self._slots)

    def check(self) -> None:
        """Replace those that have died. Raises `EngineLost` if one keeps dying."""
        for slot in self._slots:
            if slot.process.is_alive():
                continue
            slot.deaths = slot.deaths + 1 if time.monotonic() - slot.process.started < _MIN_UPTIME_S else 1
            if slot.deaths >= _MAX_DEATHS:
                raise EngineLost(f"an HTTP process died {_MAX_DEATHS} times within seconds: see the log above")
            _log.warning("an HTTP process has died: starting another")
            slot.restart()
            slot.process.configure(self._config)

    def stop(self) -> None:
        """Running requests have half a minute to finish: workers first, which may need the control process."""
        for group in (self._slots[1:], self._slots[:1]):
            for slot in group:
                slot.process.terminate()
            deadline = time.monotonic() + self._shutdown_delay_s + _STOP_TIMEOUT_S
            for slot in group:
                slot.process.wait(deadline)
        if self._control_socket is not None:
            self._control_socket.close()
        if self._counts_fd is not None:
            os.close(self._counts_fd)
            self._counts_fd = None
        if self._control_path is not None:
            self._control_path.unlink(missing_ok=True)


class _Slot:
    """A place for one process after the other."""

    def __init__(
        self, fd: int, shutdown_delay_s: float, control: str | None = None, counts: dict[str, int] | None = None
    ) -> None:
        self._options = {"fd": fd, "shutdown_delay_s": shutdown_delay_s, "control": control, "counts": counts}
        self._fds = [fd, *([] if counts is None else [counts["fd"]])]
        self.deaths = 0
        self.restart()

    def restart(self) -> None:
        self.process = _HttpProcess(self._options, self._fds)


class _HttpProcess:
    def __init__(self, options: dict[str, Any], fds: list[int]) -> None:
        self._options = options
        self.started = time.monotonic()
        # In its own session: Ctrl-C reaches only this process, which then stops the child.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "symbiosis.server"],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def configure(self, config: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**config, **self._options}).encode() + b"\n")
            self._process.stdin.close()
        except OSError:
            raise EngineLost("an HTTP process did not start: see the log above") from None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Kill it at the deadline."""
        wait_or_kill(self._process, deadline - time.monotonic())
