"""A director and engines in real processes, without a front door."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

from symbiosis.app.cluster.director_process import DirectorProcess
from symbiosis.app.cluster.engine_launcher import EngineProcesses
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.transport.engine_ipc import ClusterKey

START_S = 200.0


def engine_config(model: Path) -> dict[str, Any]:
    return {"model": str(model), "threads": 1, "adapter_gb": 0.01, "adapter_host_gb": 0.01}


class RunningCluster:
    """Engines and the director are replaced when they have been killed or stopped."""

    def __init__(self, model: Path, state: Path, count: int) -> None:
        self.secret = secrets.token_hex(16)
        self.key = ClusterKey.of(self.secret)
        config = {"host": "127.0.0.1", "port": 0, "secret": self.secret, "state": str(state), "engines": count}
        self.director = DirectorProcess(config)
        shared = {"host": "127.0.0.1", "secret": self.secret, "director": self.director.address.to_json()}
        self.launcher = EngineProcesses({**engine_config(model), **shared})
        self.launcher.keep(count, ())
        self.count = count
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check)
        self._thread.start()

    def _check(self) -> None:
        while not self._closing.wait(0.1):
            self.director.check()
            self.launcher.check()

    def client(self, **options: Any) -> ClusterClient:
        return ClusterClient(self.director.address, self.key, **options)

    async def wait_for_engines(self, client: ClusterClient) -> None:
        deadline = time.monotonic() + START_S
        while len(client.engines) < self.count:
            assert time.monotonic() < deadline, f"there are only {client.engines}"
            await asyncio.sleep(0.05)

    async def disturb(self, client: ClusterClient, name: str, fault: str) -> None:
        """Kill an engine or the director, stop an engine, or freeze one until it is lost, as a broken network would."""
        if fault == "director":
            os.kill(self.director.pid, signal.SIGKILL)
            return
        pid = self.launcher.pids[name]
        if fault == "freeze":
            os.kill(pid, signal.SIGSTOP)
            while name in client.engines:
                await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            while name in client.engines:
                await asyncio.sleep(0.05)
        await self.wait_for_engines(client)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for pid in self.launcher.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.launcher.close()
        self.director.close()
