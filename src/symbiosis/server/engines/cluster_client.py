"""The engines of a cluster, seen from an HTTP process: requests go on at another engine if theirs is lost or closes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from symbiosis.errors import Closed, EngineLost, SymbiosisError
from symbiosis.server.engines.engine_client import ActiveRequests, EngineClient
from symbiosis.server.engines.rpc_client import Inbox
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import GenerateRequest
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, IpcClient

_CONNECT_S = 10.0
_SILENCE_S = 3.0  # an engine sends a heartbeat every second
_log = logging.getLogger("symbiosis")


def least_loaded(request: GenerateRequest, load: Mapping[str, int]) -> str:
    """The engine with the fewest requests of this process."""
    return min(load, key=lambda name: (load[name], name))


class ClusterClient:
    """One per HTTP process. `set_engines` follows the cluster; everything else has the interface of `EngineClient`."""

    def __init__(
        self,
        key: ClusterKey,
        *,
        choose: Callable[[GenerateRequest, Mapping[str, int]], str] = least_loaded,
        patience_s: float = 30.0,
    ) -> None:
        """`choose` returns one of the engines, which are given with their numbers of requests. A request waits for an engine
        for `patience_s`, then it fails with `EngineLost`.
        """
        self._key, self._choose, self._patience_s = key, choose, patience_s
        self._engines: dict[str, EngineClient] = {}
        self._addresses: dict[str, EngineAddress] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    @property
    def engines(self) -> list[str]:
        """Names of the engines that take requests."""
        return sorted(self._engines)

    async def set_engines(self, addresses: Mapping[str, EngineAddress]) -> None:
        """The engines there are. Returns when the new ones have replied, or cannot be reached."""
        for name in [name for name, address in self._addresses.items() if addresses.get(name) != address]:
            self._addresses.pop(name)
            if (watcher := self._watchers.pop(name, None)) is not None:
                watcher.cancel()
                await asyncio.wait({watcher})
        new = {name: address for name, address in addresses.items() if name not in self._addresses}
        self._addresses |= new
        await asyncio.gather(*(self._connect(name, address) for name, address in new.items()))

    async def _connect(self, name: str, address: EngineAddress) -> None:
        engine = EngineClient(IpcClient(address, self._key, timeout_s=_SILENCE_S))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await engine.start()
        except (EngineLost, TimeoutError):
            _log.warning("engine %s at %s cannot be reached: it takes no requests", name, address.messages)
            self._addresses.pop(name, None)
            await engine.close()
            return
        self._watchers[name] = asyncio.create_task(self._watch(name, engine))
        async with self._changed:
            self._engines[name] = engine
            self._changed.notify_all()

    async def _watch(self, name: str, engine: EngineClient) -> None:
        """Until the engine is lost, or leaves the cluster."""
        try:
            await engine.lost.wait()
            _log.warning("engine %s is lost", name)
        finally:
            del self._engines[name]
            if self._addresses.pop(name, None) is not None:
                self._watchers.pop(name, None)
            await engine.close()  # its requests go on elsewhere

    async def close(self) -> None:
        await self.set_engines({})

    @asynccontextmanager
    async def submit(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[ActiveRequests]:
        """As `EngineClient.submit`. Seeds are fixed here: another engine must sample what the first would have sampled."""
        active = ActiveRequests(self, [_with_seed(request) for request in requests])
        try:
            await active.start()
            yield active
        finally:
            await active.close()

    async def place(self, request: GenerateRequest, inbox: Inbox) -> tuple[EngineClient, str]:
        """See `engine_client.Engines`."""
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(lambda: any(engine.is_alive() for engine in self._engines.values()))
                    load = {name: engine.num_open for name, engine in self._engines.items() if engine.is_alive()}
                    try:
                        engine = self._engines[self._choose(request, load)]
                        return engine, await engine.open(messages.encode_request(request), inbox)
                    except EngineLost:
                        await asyncio.sleep(0)
        except TimeoutError:
            raise EngineLost(f"no engine of the cluster took the request within {self._patience_s:g} s") from None

    def can_resume(self, error: SymbiosisError) -> bool:
        """See `engine_client.Engines`."""
        return isinstance(error, Closed | EngineLost)


def _with_seed(request: GenerateRequest) -> GenerateRequest:
    if request.sampling.seed is not None or request.sampling.is_greedy:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(62)))
