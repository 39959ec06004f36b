"""A whole cluster in real processes: a front door, a director and engines of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai

from symbiosis.app.cluster.cluster_host import ClusterHost
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.transport.engine_ipc import ClusterKey
from tests.tiny_chat import make_tiny_chat

START_S = 200.0
KEYS = {"ann": "ann-secret", "bob": "bob-secret"}
ADMIN = "admin-secret"


def engine_config(model: Path) -> dict[str, Any]:
    return {"model": str(model), "threads": 1, "adapter_gb": 0.01, "adapter_host_gb": 0.01}


class RunningCluster:
    """Engines and the director are replaced when they have been killed or stopped."""

    def __init__(
        self, folder: Path, count: int = 2, max_length: int = 256, *, host: dict[str, Any] | None = None, **engine: Any
    ) -> None:
        """`max_length` of a sequence; `engine`: more of the configuration of engines; `host`: more options of the host."""
        self.count = count
        self.model = make_tiny_chat(folder / "tiny", max_length)
        self.host = ClusterHost(
            "127.0.0.1:0",
            engine=engine_config(self.model) | engine,
            engines=count,
            state=folder / "state",
            keys=KEYS,
            admin_key=ADMIN,
            workers=2,
            requests=RequestLimits(at_once=40),
            **(host or {}),
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check)
        self._thread.start()
        self.until(lambda: len(self.engines()) == count)

    def _check(self) -> None:
        while not self._closing.wait(0.1):
            self.host.check()

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.host.url}/v1", api_key=key, max_retries=0, timeout=120)

    def ask(self, method: str, path: str, key: str, **more) -> httpx2.Response:
        return httpx2.request(method, self.host.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, **more)

    def engines(self) -> dict:
        return self.ask("GET", "/v1/statistics", ADMIN).json()["engines"]

    def figures(self) -> dict:
        """Of the whole cluster."""
        return self.ask("GET", "/v1/statistics", ADMIN).json()["cluster"]

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics", ADMIN).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def until(self, condition) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def link(self, secret: str | None = None, **options: Any) -> ClusterClient:
        """Of an HTTP process."""
        return ClusterClient(self.host.director, ClusterKey.of(secret or self.host.secret), **options)

    async def wait_for_engines(self, client: ClusterClient) -> None:
        deadline = time.monotonic() + START_S
        while len(client.engines) < self.count:
            assert time.monotonic() < deadline, f"there are only {client.engines}"
            await asyncio.sleep(0.05)

    async def disturb(self, client: ClusterClient, name: str, fault: str) -> None:
        """Kill an engine or the director, stop an engine, or freeze one until it is lost, as a broken network would."""
        if fault == "director":
            os.kill(self.host.director_pid, signal.SIGKILL)
            return
        pid = self.host.launcher.pids[name]
        os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "freeze": signal.SIGSTOP}[fault])
        while name in client.engines:
            await asyncio.sleep(0.05)
        if fault == "freeze":
            os.kill(pid, signal.SIGCONT)
        await self.wait_for_engines(client)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.host.close()
