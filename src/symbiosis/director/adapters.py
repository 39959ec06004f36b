"""The adapters of a cluster: one registry, and which engine has which version."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from symbiosis.adapters.names import resolve_adapter_name
from symbiosis.director.members import Member, Members
from symbiosis.errors import AdapterExists, EngineLost, NotStored, SymbiosisError, UnknownAdapter
from symbiosis.jobs.atomic_files import write_atomic
from symbiosis.serving.engine_messages import text_field
from symbiosis.store.artifact_cache import LOCATION
from symbiosis.transport.engine_ipc import Body

_MAX_PATH = 4096
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """What a name stands for."""

    folder: str
    """Its location: a folder that all engines can read, or an artifact of the cluster's store."""
    hash: str
    version: int
    pinned: bool = False


class ClusterAdapters:
    """Engines load an adapter with the first request for it that is placed there."""

    def __init__(self, members: Members, file: Path, choose: Callable[[], Member], *, has_store: bool = False) -> None:
        """`file` keeps the registry over restarts. `choose`: an engine that checks a new adapter. Raises `NotStored`.

        `has_store`: adapters are in the cluster's store. Those of a registry from before that was so, or is not, are dropped.
        """
        self._members, self._file, self._choose = members, file, choose
        self._loading: dict[tuple[str, str], asyncio.Lock] = {}
        self.served: dict[str, ServedAdapter] = {}
        self._versions = 0
        if file.exists():
            try:
                self.served = {name: ServedAdapter(**each) for name, each in json.loads(file.read_bytes()).items()}
            except (OSError, ValueError, TypeError, AttributeError):
                raise NotStored(
                    f"{file} cannot be read: expected the adapters of a cluster. Remove it, and load them again"
                ) from None
            served = self.served.items()
            self.served = {name: each for name, each in served if each.folder.startswith(LOCATION) == has_store}
            self._versions = max((each.version for each in self.served.values()), default=0)

    def resolve(self, name: str, tenant: str) -> str:
        """The cluster's name for a tenant's. Raises `UnknownAdapter`."""
        return resolve_adapter_name(name, tenant, self.served)

    def version(self, name: str) -> int:
        """Of the adapter that a name stands for; 0 if there is none."""
        adapter = self.served.get(name)
        return 0 if adapter is None else adapter.version

    async def ensure(self, member: Member, name: str) -> None:
        """Load it on this engine unless its version is there. Raises why it cannot be loaded."""
        adapter = self.served.get(name)
        if adapter is None or member.loaded.get(name) == adapter.version:
            return
        async with self._loading.setdefault((member.name, name), asyncio.Lock()):
            while (adapter := self.served.get(name)) is not None and member.loaded.get(name) != adapter.version:
                await member.client.ask("load", name=name, folder=adapter.folder, replace=True)
                member.loaded[name] = adapter.version
                if adapter.pinned:
                    await member.client.ask("pin", name=name, pinned=True)
        self._loading.pop((member.name, name), None)

    def put(self, name: str, folder: str, hash: str, member: Member) -> None:
        """It is served from now on, and this engine has it."""
        self._versions += 1
        pinned = name in self.served and self.served[name].pinned
        self.served[name] = ServedAdapter(folder, hash, self._versions, pinned)
        member.loaded[name] = self._versions
        self._store()

    # Operations

    async def load(self, id: str, body: Body) -> Body:
        name, folder = text_field(body, "name"), text_field(body, "folder", _MAX_PATH)
        if name in self.served and body.get("replace") is not True:
            raise AdapterExists(f"an adapter {name!r} is served already: unload it first, or replace it (load_inplace)")
        member = self._choose()
        result = await member.client.ask("load", name=name, folder=folder, replace=True)
        self.put(name, folder, str(result["hash"]), member)
        return {**result, "generation": self._versions}

    async def unload(self, id: str, body: Body) -> Body:
        name = text_field(body, "name")
        if self.served.pop(name, None) is None:
            raise UnknownAdapter(f"there is no adapter {name!r} here")
        self._store()
        await self._on_all(name, "unload")
        for member in self._members.by_name.values():
            member.loaded.pop(name, None)
        return {}

    async def pin(self, id: str, body: Body) -> Body:
        name, pinned = text_field(body, "name"), body.get("pinned") is True
        adapter = self.served.get(name)
        if adapter is None:
            raise UnknownAdapter(f"there is no adapter {name!r} here")
        self.served[name] = ServedAdapter(adapter.folder, adapter.hash, adapter.version, pinned)
        self._store()
        await self._on_all(name, "pin", pinned=pinned)
        return {}

    async def _on_all(self, name: str, op: str, **body: object) -> None:
        """On the engines that have it."""

        async def ask(member: Member) -> None:
            try:
                await member.client.ask(op, name=name, **body)
            except (UnknownAdapter, EngineLost):
                pass
            except SymbiosisError as error:
                _log.warning("engine %s: %s of %s failed: %s", member.name, op, name, error)

        await asyncio.gather(*(ask(member) for member in list(self._members.by_name.values()) if name in member.loaded))

    def _store(self) -> None:
        text = json.dumps({name: asdict(each) for name, each in self.served.items()})
        try:
            write_atomic(self._file, text.encode())
        except OSError as error:  # served all the same; a restarted director would not know it
            _log.warning("the adapters of the cluster cannot be stored in %s: %s", self._file, error.strerror)
