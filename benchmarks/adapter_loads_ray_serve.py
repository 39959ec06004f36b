"""The Ray Serve side of `benchmarks.adapter_loads`: a deployment with `@serve.multiplexed`, over the engine of Symbiosis.

`python -m benchmarks.adapter_loads_ray_serve CONFIG` prints its address and serves until stdin ends. Replicas write each load
and eviction of an adapter to a file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

Config = dict[str, Any]


class LoadedAdapter:
    """An adapter of a replica, unloaded once Ray Serve has evicted it and its last request has ended."""

    def __init__(self, replica: Replica, adapter: str, name: str) -> None:
        self._replica, self._adapter, self.name = replica, adapter, name
        self._users = 0
        self._is_evicted = False
        self._is_unloaded = False

    def __enter__(self) -> str:
        self._users += 1
        return self.name

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        self._unload()

    async def __del__(self) -> None:
        """Called by Ray Serve."""
        if not self._is_evicted:
            self._is_evicted = True
            self._replica.write(evict=self._adapter)
            self._unload()

    def _unload(self) -> None:
        if self._is_evicted and not self._users and not self._is_unloaded:
            self._is_unloaded = True
            self._replica.unload(self.name)


class Replica:
    """One engine."""

    def __init__(self, config: Config) -> None:
        import torch

        from symbiosis.app.engine_host import EngineHost
        from symbiosis.models.fuse_projections import fuse_projections
        from symbiosis.models.loading import load
        from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
        from symbiosis.transport.engine_ipc import EngineListener

        torch.set_num_threads(1)
        self._config = config
        model = load(config["model"], device=torch.device("cpu"), dtype=None).model
        fuse_projections(model)
        # Ray Serve evicts adapters that requests use: the engine has room for both.
        residency = AdapterCacheConfig(device_bytes=500_000_000, slots=4 * config["slots"])
        listener = EngineListener(Path(tempfile.mkdtemp()))
        self._host = EngineHost(model, "base", listener, training=None, residency=residency, max_running=config["running"])
        self._client: Any = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._events = (Path(config["events"]) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, **event: str) -> None:
        self._events.write(json.dumps(event) + "\n")

    def unload(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._client.ask("unload", name=name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        from symbiosis.server.engines.engine_client import EngineClient
        from symbiosis.transport.engine_ipc import IpcClient

        async with self._lock:
            if self._client is None:
                client = EngineClient(IpcClient(self._host.service.address))
                await client.start()
                self._client = client

    async def load_adapter(self, adapter: str) -> LoadedAdapter:
        self.write(load=adapter)
        name = f"{adapter}-{next(self._numbers)}"
        await self._client.ask("load", name=name, folder=f"{self._config['adapters']}/{adapter}", replace=False)
        return LoadedAdapter(self, adapter, name)

    async def generate(self, adapter: LoadedAdapter, body: dict[str, Any]) -> dict[str, Any]:
        from symbiosis.serving.engine_messages import GenerateRequest, Token
        from symbiosis.serving.scheduling.sequence import Sampling

        with adapter as name:
            sampling = Sampling(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True)
            request = GenerateRequest(prompt=body["prompt"], sampling=sampling, adapter=name)
            tokens: list[int] = []
            async with self._client.submit([request]) as active:
                async for events in active.events():
                    tokens += [event.token for _, event in events if isinstance(event, Token)]
        return {"tokens": tokens}


def deploy(config: Config) -> str:
    """The address."""

    @serve.deployment(num_replicas=config["engines"], max_ongoing_requests=config["running"], ray_actor_options={"num_cpus": 0})
    class Deployment(Replica):
        @serve.multiplexed(max_num_models_per_replica=config["slots"])
        async def get_model(self, adapter: str) -> LoadedAdapter:
            return await self.load_adapter(adapter)

        async def __call__(self, request: Request) -> dict[str, Any]:
            await self._connect()
            adapter = await self.get_model(serve.get_multiplexed_model_id())
            return await self.generate(adapter, await request.json())

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Deployment.bind(config))
    return f"http://127.0.0.1:{port}"


def main() -> None:
    config = json.loads(sys.argv[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # of replicas
    # `num_cpus`: more than there are, as four engines share the cores of this host in both systems
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver="ADAPTER_LOADS_LOG" in os.environ,
        object_store_memory=100_000_000,
    )
    print("url", deploy(config), flush=True)
    over = threading.Thread(target=sys.stdin.read)
    over.start()
    over.join()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
