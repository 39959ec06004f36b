"""A cluster on this host: a director, engines and a front door. More engines may join from other hosts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symbiosis.adapters.names import qualify_name
from symbiosis.app.cluster.director_process import DirectorProcess
from symbiosis.app.cluster.engine_launcher import EngineLauncher, EngineProcesses
from symbiosis.app.cluster_store import check_store, store_config
from symbiosis.app.front_door import FrontDoor
from symbiosis.cluster.policies.objective import Objective
from symbiosis.errors import EngineLost, SymbiosisError
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.engines.director_link import DirectorLink
from symbiosis.server.engines.rpc_client import Inbox, RpcClient
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.shared_adapters import SharedAdapterStore
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress

DEFAULT_CACHE_GB = 20.0
"""Of artifacts of the store, on each host."""
_START_TIMEOUT_S = 600.0
_MIN_SECRET = 16
_PATIENCE_S = 30.0
_log = logging.getLogger("symbiosis")


class ClusterHost:
    """Serves until closed. A context manager.

    `engine` is the configuration of `app.engine_process`; `engines` run on this host, or more by the director's choice, up to
    `max_engines`. `host` is where director and engines listen; `secret` is what engines of other hosts join with. `state` keeps
    the registry of adapters. `launcher` is called with the configuration of engines. `front_door` are options of `FrontDoor`.
    `store` is a folder that all hosts share, or a bucket; without it, engines read and write the folders of the front door.
    """

    def __init__(
        self,
        address: str,
        *,
        engine: Mapping[str, Any],
        engines: int,
        max_engines: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        state: Path,
        profile: str | None = None,
        objective: Objective = Objective(),  # noqa: B008 - frozen
        temperature: float | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        workers: int = 1,
        requests: RequestLimits | None = None,
        launcher: Callable[[Mapping[str, Any]], EngineLauncher] = EngineProcesses,
        store: str | None = None,
        store_cache_gb: float = DEFAULT_CACHE_GB,
        **front_door: Any,
    ) -> None:
        secret = secrets.token_hex(16) if secret is None else secret
        if len(secret) < _MIN_SECRET:
            raise SymbiosisError(f"the cluster's secret has {len(secret)} characters: expected at least {_MIN_SECRET}")
        self.secret = secret
        requests = requests or RequestLimits()
        self._store = None if store is None else store_config(store, store_cache_gb)
        if store is not None:
            check_store(store, secret, store_cache_gb, claim=True)
        self._door = FrontDoor(address, workers=workers, requests=requests, store=self._store, **front_door)
        self.url = self._door.url
        self._director: DirectorProcess | None = None
        self.launcher: EngineLauncher | None = None
        self._link: HostLink | None = None
        try:
            self._director = DirectorProcess(
                {
                    "host": host,
                    "port": port,
                    "secret": secret,
                    "state": str(state),
                    "engines": engines,
                    "max_engines": max_engines,
                    "profile": profile,
                    "objective": asdict(objective),
                    "at_once": requests.at_once,
                    "per_minute": requests.per_minute,
                    "has_keys": self._door.has_keys,
                    "store": store,
                }
            )
            config = {**engine, "host": host, "secret": secret, "director": self.director.to_json()}
            config |= {"store": store, "store_cache_gb": store_cache_gb}
            self.launcher = launcher(config)
            self.launcher.keep(engines, ())
            self._link = HostLink(self.director, ClusterKey.of(secret))
            table = self._wait_for_engine()
            self._load_adapters(dict(adapters or {}))
            facts, model = table["facts"][0], table["model"]
            sampling = facts["default_sampling"] if temperature is None else {"temperature": temperature}
            self._door.configure(
                {"director": self.director.to_json(), "secret": secret},
                facts["tokenizer"],
                base=model["name"],
                hub_id=model["hub_id"],
                default_sampling=sampling,
                max_model_len=facts["max_model_len"],
                max_training_len=facts["max_training_len"],
                training_error=facts["training_error"],
            )
        except BaseException:
            self.close()
            raise

    @property
    def director(self) -> EngineAddress:
        assert self._director is not None
        return self._director.address

    @property
    def director_pid(self) -> int:
        assert self._director is not None
        return self._director.pid

    @property
    def http_pids(self) -> list[int]:
        return self._door.processes.pids

    def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """An operation of the director, such as statistics or drain."""
        assert self._link is not None
        return self._link.ask(op, **body)

    def _wait_for_engine(self) -> dict[str, Any]:
        assert self._link is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            table = self._link.table
            if table is not None and table["engines"]:
                return table
            self.check_members()
            time.sleep(0.05)
        raise EngineLost(f"no engine has joined within {_START_TIMEOUT_S:g} s: see the log above")

    def _load_adapters(self, adapters: dict[str, str | Path]) -> None:
        """Those given at the start, and stored uploads; a failure of the former raises."""
        known = self.ask("stats")["adapters"]
        with self._open_adapters() as store:
            for name, folder in adapters.items():
                location = store.provide(name, Path(folder).resolve())
                self.ask("load", name=name, folder=location, replace=True)
                store.add_provided(name, location)
            for stored in store.stored:
                name = qualify_name(stored.owner, stored.name)
                if name in known or name in adapters:
                    continue
                try:
                    self.ask("load", name=name, folder=stored.location, replace=True)
                except SymbiosisError as error:
                    _log.warning("the adapter %s in %s is not served: %s", stored.name, stored.location, error)

    @contextmanager
    def _open_adapters(self) -> Iterator[AdapterStore]:
        """Before the HTTP processes, which open it then."""
        limits = self._door.settings.store_limits
        if self._store is None:
            store = AdapterStore(self._door.uploads, limits)
            store.open()
            yield store
            return
        with closing(self._store.open()) as cache:
            store = SharedAdapterStore(cache, limits)
            store.open()
            yield store

    def check_members(self) -> None:
        """Replace the director or engines that have died. Raises `EngineLost` if they keep dying."""
        assert self._director is not None
        assert self.launcher is not None
        assert self._link is not None
        self._director.check()
        if (wish := self._link.take_wish()) is not None:
            self.launcher.keep(wish.engines, wish.leave, wish.hung)
        self.launcher.check()

    def check(self) -> None:
        """The same for all processes. Call it several times a second."""
        self.check_members()
        self._door.processes.check()

    def close(self) -> None:
        """Let running requests finish for half a minute, then stop everything."""
        self._door.processes.stop()
        for part in (self._link, self.launcher, self._director, self._door):
            if part is not None:
                part.close()

    def __enter__(self) -> ClusterHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Wish:
    """What the director wants of a launcher."""

    engines: int
    """How many run."""
    leave: list[str]
    """Engines that stop."""
    hung: list[str]
    """Engines that are killed and replaced."""


class HostLink:
    """This process at the director: which engines there are, and which are wanted. On a thread of its own.

    `engines` is how many engines this process keeps running by itself, more than the director wants; None: it is no launcher.
    """

    def __init__(self, director: EngineAddress, key: ClusterKey, engines: int | None = 0) -> None:
        self._engines = engines
        self.table: dict[str, Any] | None = None
        self._wish: Wish | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="symbiosis-director", daemon=True)
        self._thread.start()
        self._link: DirectorLink = self._run(self._open(director, key))

    async def _open(self, director: EngineAddress, key: ClusterKey) -> DirectorLink:
        link = DirectorLink(director, key, self._follow)
        link.start()
        return link

    async def _follow(self, client: RpcClient) -> None:
        inbox = Inbox()
        await client.open({"op": "watch"}, inbox)
        if self._engines is not None:
            await client.open({"op": "launch", "engines": self._engines}, inbox)
        while True:
            for raw in await inbox.take():
                if raw is None:
                    return
                if "engines" in raw:
                    self.table = raw
                if "wanted" in raw:
                    self._wish = Wish(raw["wanted"], raw["leave"], raw["hung"])

    def take_wish(self) -> Wish | None:
        """If there is a new one."""
        wish, self._wish = self._wish, None
        return wish

    def ask(self, op: str, **body: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._run(self._ask(op, body))
        return result

    async def _ask(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        return await (await self._link.get(_PATIENCE_S)).ask(op, **body)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._run(self._link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
