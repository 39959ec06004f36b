"""Engines of this host that join the cluster of another: processes here, and a link to the director there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from symbiosis.app.cluster.cluster_host import DEFAULT_CACHE_GB, HostLink
from symbiosis.app.cluster.engine_launcher import EngineProcesses
from symbiosis.app.cluster.ray_node import split_address
from symbiosis.app.cluster_store import check_store
from symbiosis.errors import BadAddress, EngineLost, Unauthorized, Unreachable
from symbiosis.server.engines.rpc_client import RpcClient
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, IpcClient

_CONNECT_S = 5.0
_log = logging.getLogger("symbiosis")


def director_address(address: str, secret: str) -> EngineAddress:
    """From HOST:PORT: the director's key follows from the secret. Raises `BadAddress`."""
    host, port = split_address(address)
    host = f"[{host}]" if ":" in host else host
    return EngineAddress(f"tcp://{host}:{port}", "", ClusterKey.of_director(secret).public.decode())


def check_director(address: str, secret: str) -> None:
    """Raises `BadAddress`, `Unreachable`, or `Unauthorized` if it has another secret."""
    try:
        socket.create_connection(split_address(address), _CONNECT_S).close()
    except OSError as error:
        raise Unreachable(
            f"no director at {address} ({error.strerror or error}): expected the address that `symbiosis cluster up` printed"
        ) from None

    async def greet() -> None:
        client = RpcClient(IpcClient(director_address(address, secret), ClusterKey.of(secret)))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await client.start()
        finally:
            await client.close()

    try:
        asyncio.run(greet())
    except (TimeoutError, EngineLost):
        raise Unauthorized(
            f"the director at {address} does not reply to this secret: copy the secret file of `symbiosis cluster up`, "
            "and check that the address is that of the director"
        ) from None


def own_host_towards(address: str) -> str:
    """This host's address on the way to another. Raises `BadAddress`."""
    host, port = split_address(address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadAddress(f"there is no way to {host}: {error.strerror}") from None


class JoinedEngines:
    """`engines` processes, until closed. Engines that the director lets go are not replaced. A context manager."""

    def __init__(
        self,
        address: str,
        secret: str,
        *,
        engine: Mapping[str, Any],
        engines: int,
        host: str,
        joined: Callable[[str], None],
        ready_file: Path | None = None,
        store_cache_gb: float = DEFAULT_CACHE_GB,
    ) -> None:
        """`engine` is the configuration of `app.engine_process`; `joined` is called with the name of each that has joined.

        `ready_file` exists while all of them are in the cluster. Raises `StoreUnavailable` if this host cannot use its store.
        """
        director = director_address(address, secret)
        self._wanted, self._joined, self._ready_file = engines, joined, ready_file
        self._known: set[str] = set()
        self._set_ready(False)  # what a process that was killed has left
        self._link = HostLink(director, ClusterKey.of(secret), engines)
        try:
            store = self._link.ask("store")["url"]
            if store is not None:
                check_store(store, secret, store_cache_gb)
            prefix = f"{socket.gethostname().partition('.')[0][:60]}-engine"
            config = {**engine, "host": host, "secret": secret, "director": director.to_json()}
            config |= {"store": store, "store_cache_gb": store_cache_gb}
            self.launcher = EngineProcesses(config, prefix)
            try:
                self.launcher.keep(engines, ())
            except BaseException:  # a signal, too
                self.launcher.close()
                raise
        except BaseException:
            self._link.close()
            raise

    def check(self) -> int:
        """How many engines still run here. Raises `EngineLost` if the cluster does not take them, or if they keep dying."""
        own = self.launcher.pids
        if (wish := self._link.take_wish()) is not None:
            leave = [name for name in wish.leave if name in own]
            self._wanted -= len(leave)
            self.launcher.keep(self._wanted, leave, wish.hung)
        self.launcher.check()
        table = self._link.table
        there = set() if table is None else table["engines"].keys() & own.keys()
        for name in sorted(there - self._known):
            self._known.add(name)
            self._joined(name)
        self._set_ready(len(there) >= self._wanted)
        return self._wanted

    def _set_ready(self, is_ready: bool) -> None:
        if self._ready_file is None:
            return
        if is_ready:
            self._ready_file.touch()
        else:
            self._ready_file.unlink(missing_ok=True)

    def close(self) -> None:
        self._set_ready(False)
        self.launcher.close()
        self._link.close()

    def __enter__(self) -> JoinedEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
