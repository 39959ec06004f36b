"""The routes of adapters: which there are, uploading and removing one's own, and the admin's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from symbiosis.adapters.files import CONFIG
from symbiosis.adapters.names import qualify_name, split_qualified_name
from symbiosis.errors import BadAdapter, Forbidden, UnknownAdapter
from symbiosis.server.adapter_store import FIELDS, AdapterStore, AdapterUpload
from symbiosis.server.auth import Caller
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.keyed_locks import KeyedLocks
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.openai.schemas import LoadAdapterRequest, Named, PinAdapterRequest, UnloadAdapterRequest
from symbiosis.server.requests.body import read_form, read_json
from symbiosis.server.settings import Settings

_MAX_CONFIG = 1 << 20
_WRITE_AT_ONCE = 1 << 20
CheckName: TypeAlias = Callable[[str | None, str], Awaitable[None]]
"""Of an owner and a name."""
Promised: TypeAlias = Callable[[str], Awaitable[int]]
"""How many adapters jobs of a tenant will bring."""


class AdapterRoutes:
    """Handlers. An adapter belongs to who uploaded it; the admin's are for everybody.

    `check_name` is asked before an adapter comes under a name, and raises if that is reserved.
    What is `promised` counts as if it were here.
    """

    def __init__(
        self, remote: EngineClient, settings: Settings, store: AdapterStore | None, check_name: CheckName, promised: Promised
    ) -> None:
        self._remote, self._settings, self._store = remote, settings, store
        self._check_name, self._promised = check_name, promised
        self._ending: set[asyncio.Task[Any]] = set()
        self._changing = KeyedLocks()
        """By owner and name: what is served under it and what is kept change together."""

    def visible(self, caller: Caller, served: dict[str, Any]) -> dict[str, tuple[str | None, Any]]:
        """Owner and content hash of the adapters a caller may name, its own before those for everybody."""
        found = [(*split_qualified_name(full), hash) for full, hash in served.items()]
        shared = {name: (owner, hash) for owner, name, hash in found if owner is None}
        return shared | {name: (owner, hash) for owner, name, hash in found if owner == caller.tenant}

    async def list(self, request: Request) -> Response:
        """What a caller may name; to the admin, all there are."""
        caller: Caller = request.state.caller
        stats = await self._remote.ask("stats")
        served = stats["adapters"]
        if caller.is_admin:
            found = [(*split_qualified_name(full), hash) for full, hash in served.items()]
        else:
            found = [(owner, name, hash) for name, (owner, hash) in self.visible(caller, served).items()]
        found.sort(key=lambda each: (each[1], each[0] or ""))
        return JSONResponse({"object": "list", "data": [self._about(*each, stats["adapters_pinned"]) for each in found]})

    def _about(self, owner: str | None, name: str, hash: str, pinned: Collection[str]) -> dict[str, Any]:
        kept = None if self._store is None else self._store.get(owner, name)
        size = None if kept is None else kept.bytes
        about = {"id": name, "object": "adapter", "owner": owner, "parent": self._settings.base, "root": hash, "bytes": size}
        return {**about, "pinned": qualify_name(owner, name) in pinned}

    async def upload(self, request: Request) -> Response:
        """Take the two files of an adapter, and serve it if it can be; one of that name is replaced."""
        name, owner = self._name(request), request.state.caller.owner
        if self._store is None:
            raise Forbidden("this server takes no adapters: it was started without a place for them (--uploads FOLDER)")
        await self._check_name(owner, name)
        upload = self._store.begin(owner, name)
        try:
            if self._store.get(owner, name) is None:  # else it takes that one's place
                # once it has begun: of an upload and a job that come together, neither overlooks the other
                self._store.check_count(owner, await self._promised(request.state.caller.tenant))
            await self._receive(request, upload)
        except BaseException:
            upload.drop()
            raise
        # from here on it comes to its end, also if the client does not wait for it
        ending = asyncio.create_task(self._serve(upload))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        hash = await asyncio.shield(ending)
        pinned = (await self._remote.ask("stats"))["adapters_pinned"]
        return JSONResponse(self._about(owner, name, hash, pinned), 201)

    async def _receive(self, request: Request, upload: AdapterUpload) -> None:
        held: dict[str, bytearray] = {field: bytearray() for field in FIELDS}
        config = 0
        async for field, piece in read_form(request, self._settings.store.bytes + _MAX_CONFIG, FIELDS):
            config += len(piece) if field == "config" else 0
            if config > _MAX_CONFIG:
                raise BadAdapter(f"{CONFIG} has more than {_MAX_CONFIG} bytes")
            held[field] += piece
            if len(held[field]) >= _WRITE_AT_ONCE:
                await asyncio.to_thread(upload.write, field, bytes(held[field]))
                held[field].clear()
        for field, rest in held.items():
            await asyncio.to_thread(upload.write, field, bytes(rest))
        await asyncio.to_thread(upload.complete)

    async def _serve(self, upload: AdapterUpload) -> str:
        name = qualify_name(upload.owner, upload.name)
        try:
            async with self._changing.of((upload.owner, upload.name)):
                found = await self._remote.ask("load", name=name, folder=str(upload.folder), replace=True)
                upload.keep()
        except BaseException:
            upload.drop()
            raise
        hash: str = found["hash"]
        return hash

    async def download(self, request: Request) -> Response:
        """One of the two files of an adapter of one's own, as PEFT reads them."""
        name, file = self._name(request), request.path_params["file"]
        kept = None if self._store is None else self._store.get(request.state.caller.owner, name)
        if kept is None or file not in FIELDS.values() or not (kept.folder / file).exists():  # a newer one may have come
            raise UnknownAdapter(f"there is no adapter {name!r} of yours that is kept here with a file {file!r:.60}")
        return FileResponse(kept.folder / file, media_type="application/octet-stream")

    async def remove(self, request: Request) -> Response:
        """One's own; the admin's `?owner=` names a tenant whose it is."""
        caller: Caller = request.state.caller
        owner = caller.owner
        if caller.is_admin:
            owner = request.query_params.get("owner")
        name = self._name(request)
        await self._forget(owner, name)
        return JSONResponse({"id": name, "object": "adapter", "deleted": True})

    async def load(self, request: Request) -> Response:
        wish = await read_json(request, LoadAdapterRequest)
        self._check(wish.lora_name, "lora_name")
        folder = _confined(self._settings.adapter_root, wish.lora_path)
        await self._check_name(None, wish.lora_name)
        async with self._changing.of((None, wish.lora_name)):
            await self._remote.ask("load", name=wish.lora_name, folder=str(folder), replace=wish.load_inplace)
            if self._store is not None:
                self._store.remove(None, wish.lora_name)  # it was replaced
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        wish = await read_json(request, UnloadAdapterRequest)
        await self._forget(None, wish.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' removed successfully.")

    async def pin(self, request: Request) -> Response:
        wish = await read_json(request, PinAdapterRequest)
        await self._remote.ask("pin", name=qualify_name(wish.owner, wish.lora_name), pinned=wish.pinned)
        return JSONResponse({"id": wish.lora_name, "object": "adapter", "owner": wish.owner, "pinned": wish.pinned})

    async def _forget(self, owner: str | None, name: str) -> None:
        async with self._changing.of((owner, name)):
            was_kept = self._store is not None and self._store.remove(owner, name)
            try:
                await self._remote.ask("unload", name=qualify_name(owner, name))
            except UnknownAdapter:
                if not was_kept:
                    raise UnknownAdapter(f"there is no adapter {name!r} of yours") from None

    def _name(self, request: Request) -> str:
        try:
            name = Named(name=request.path_params["name"]).name
        except ValidationError:
            raise BadRequest(
                "an adapter's name has up to 128 letters, digits, dots, dashes and underscores, and begins with one of the "
                "first two",
                field="name",
            ) from None
        self._check(name, "name")
        return name

    def _check(self, name: str, field: str) -> None:
        if name == self._settings.base:
            raise BadRequest(f"{name} is the base model's name: choose another", field=field)


def _confined(root: str | None, path: str) -> Path:
    """The folder that a path under the root stands for. Raises `BadAdapter`."""
    if root is None:
        raise BadAdapter("adapters are not loaded while serving: start the server with --adapter-root FOLDER")
    base = Path(root).resolve()
    folder = (base / path).resolve()
    if not folder.is_relative_to(base) or folder == base:
        raise BadAdapter("lora_path must lead to a folder inside the one given with --adapter-root")
    if not folder.is_dir():
        raise BadAdapter("lora_path: there is no such folder inside the one given with --adapter-root")
    return folder
