"""The director's process, which is started again at the same address when it dies."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from symbiosis.app.child_process import wait_or_kill
from symbiosis.errors import AddressInUse, EngineLost
from symbiosis.transport.engine_ipc import EngineAddress

_MIN_UPTIME_S, _MAX_DEATHS = 5.0, 10
_STOP_TIMEOUT_S = 10.0
_log = logging.getLogger("symbiosis")


class DirectorProcess:
    def __init__(self, config: dict[str, Any]) -> None:
        """`config` is that of `director.director.DirectorConfig`. Raises `AddressInUse` or `EngineLost`."""
        self._reserved = _reserve(config["host"], config.get("port", 0))
        self._config = {**config, "port": self._reserved.getsockname()[1]}
        self._deaths = 0
        try:
            self.address = self._start()
        except BaseException:
            self._reserved.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> EngineAddress:
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "symbiosis.director"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._config).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise EngineLost("the director ended while it started: see the log above")
        return EngineAddress.from_json(json.loads(line))

    def check(self) -> None:
        """Start it again if it has died. Raises `EngineLost` if it keeps dying."""
        if self._process.poll() is None:
            return
        self._deaths = self._deaths + 1 if time.monotonic() - self._started < _MIN_UPTIME_S else 1
        if self._deaths >= _MAX_DEATHS:
            raise EngineLost(f"the director died {_MAX_DEATHS} times within seconds: see the log above")
        _log.warning("the director has died: starting it again")
        with suppress(EngineLost):  # it died again: the next check sees it
            self._start()

    def close(self) -> None:
        self._process.terminate()
        wait_or_kill(self._process, _STOP_TIMEOUT_S)
        self._reserved.close()


def _reserve(host: str, port: int) -> socket.socket:
    """Binds the address without listening, so that it remains the director's while it starts again.

    Otherwise the system may give the port to an outgoing connection, even to one that looks for the director.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        reserved = socket.socket(family, kind)
    except OSError as error:
        raise AddressInUse(f"the director cannot listen at {host}:{port}: {error}") from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise AddressInUse(f"the director cannot listen at {host}:{port}: {error}") from error
    return reserved
