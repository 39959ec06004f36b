"""The link to a cluster's director, which is made again when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from symbiosis.errors import EngineLost
from symbiosis.server.engines.rpc_client import RpcClient
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, IpcClient

_RETRY_S = 0.25
_CONNECT_S = 5.0
_SILENCE_S = 3.0
_log = logging.getLogger("symbiosis")


class DirectorLink:
    """`connected` is awaited with each new client, for as long as that client lives."""

    def __init__(self, address: EngineAddress, key: ClusterKey, connected: Callable[[RpcClient], Awaitable[None]]) -> None:
        self._address, self._key, self._connected = address, key, connected
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.client: RpcClient | None = None
        """None while the director cannot be reached."""

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def get(self, patience_s: float) -> RpcClient:
        """The client, once there is one. Raises `EngineLost` after `patience_s`."""
        if self.client is not None and self.client.is_alive():
            return self.client
        try:
            async with asyncio.timeout(patience_s), self._changed:
                await self._changed.wait_for(lambda: self.client is not None and self.client.is_alive())
        except TimeoutError:
            raise EngineLost("the director of the cluster cannot be reached; it may be restarted") from None
        assert self.client is not None
        return self.client

    async def run(self) -> None:
        """Until it is cancelled, or `connected` raises another error than `EngineLost`."""
        was_lost = False
        while True:
            client = RpcClient(IpcClient(self._address, self._key, timeout_s=_SILENCE_S))
            try:
                with suppress(EngineLost, TimeoutError):
                    async with asyncio.timeout(_CONNECT_S):
                        await client.start()
                    if was_lost:
                        _log.warning("the director is there again")
                    was_lost = True
                    async with self._changed:
                        self.client = client
                        self._changed.notify_all()
                    await self._connected(client)
                    await client.lost.wait()
                    _log.warning("the director is lost: this process goes on without it, and tries again")
            finally:
                self.client = None
                await client.close()
            await asyncio.sleep(_RETRY_S)
