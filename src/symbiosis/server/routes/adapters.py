"""/v1/adapters: listing, upload, download and removal of adapters; and the admin's load, unload and pin."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from symbiosis.adapters.files import CONFIG
from symbiosis.adapters.names import qualify_name, split_qualified_name
from symbiosis.common.fair_executor import KeyedLocks
from symbiosis.errors import BadAdapter, Forbidden, SymbiosisError, UnknownAdapter
from symbiosis.server.adapter_store import FIELDS, AdapterStore, AdapterUpload
from symbiosis.server.auth import Caller
from symbiosis.server.engines.engine import Engine
from symbiosis.server.job_service import JobService
from symbiosis.server.model_names import ModelNames
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.openai.schemas import (
    ADAPTER_NAME,
    AdapterPath,
    LoadAdapterRequest,
    PinAdapterRequest,
    UnloadAdapterRequest,
)
from symbiosis.server.requests.body import read_form, read_json
from symbiosis.server.settings import Settings

_MAX_CONFIG_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20


def visible_adapters(caller: Caller, served: dict[str, Any]) -> dict[str, tuple[str | None, Any]]:
    """Owner and content hash by name; a tenant's own adapter hides a shared one."""
    found = [(*split_qualified_name(full), hash) for full, hash in served.items()]
    shared = {name: (owner, hash) for owner, name, hash in found if owner is None}
    return shared | {name: (owner, hash) for owner, name, hash in found if owner == caller.tenant}


class AdapterRoutes:
    """An adapter belongs to the tenant that uploads it. The admin's are shared by all tenants."""

    def __init__(self, engine: Engine, settings: Settings, store: AdapterStore, jobs: JobService) -> None:
        self._engine, self._settings, self._store, self._jobs = engine, settings, store, jobs
        self._names = ModelNames(settings.base, settings.hub_id, settings.models)
        self._name_locks = KeyedLocks()
        """By owner and name: the served and the stored adapter change together."""

    async def list(self, request: Request) -> Response:
        """The adapters that the caller may use; for the admin, all."""
        caller: Caller = request.state.caller
        stats = await self._engine.ask("stats")
        served = stats["adapters"]
        if caller.is_admin:
            found = [(*split_qualified_name(full), hash) for full, hash in served.items()]
        else:
            found = [(owner, name, hash) for name, (owner, hash) in visible_adapters(caller, served).items()]
        found.sort(key=lambda each: (each[1], each[0] or ""))
        return JSONResponse({"object": "list", "data": [self._body(*each, stats) for each in found]})

    def _body(self, owner: str | None, name: str, hash: str, stats: dict[str, Any]) -> dict[str, Any]:
        stored, full = self._store.get(owner, name), qualify_name(owner, name)
        parent = stats.get("adapter_models", {}).get(full, self._settings.base)
        body = {"id": name, "object": "adapter", "owner": owner, "parent": parent, "root": hash}
        return {**body, "bytes": None if stored is None else stored.bytes, "pinned": full in stats["adapters_pinned"]}

    async def upload(self, request: Request) -> Response:
        """Store the two files of an adapter and serve it, in place of an older one of that name."""
        name, owner = self._parse_name(request), request.state.caller.owner
        await asyncio.to_thread(self._jobs.supervisor.check_name, owner, name)
        upload = self._store.open_upload(owner, name)
        try:
            if self._store.get(owner, name) is None:
                # After the upload is open: a concurrent upload and job each count the other.
                count_expected = self._jobs.admission.count_expected_adapters
                self._store.check_count(owner, await asyncio.to_thread(count_expected, request.state.caller.tenant))
            await self._receive(request, upload)
        except BaseException:
            await self._jobs.finish(asyncio.to_thread(upload.abort))
            raise
        hash = await self._jobs.finish(self._serve(upload))
        return JSONResponse(self._body(owner, name, hash, await self._engine.ask("stats")), 201)

    async def _receive(self, request: Request, upload: AdapterUpload) -> None:
        buffers: dict[str, bytearray] = {field: bytearray() for field in FIELDS}
        config_bytes = 0
        async for field, chunk in read_form(request, self._settings.store_limits.bytes + _MAX_CONFIG_BYTES, FIELDS):
            config_bytes += len(chunk) if field == "config" else 0
            if config_bytes > _MAX_CONFIG_BYTES:
                raise BadAdapter(f"{CONFIG} has more than the {_MAX_CONFIG_BYTES} bytes allowed")
            buffers[field] += chunk
            if len(buffers[field]) >= _WRITE_BYTES:
                await asyncio.to_thread(upload.write, field, bytes(buffers[field]))
                buffers[field].clear()
        for field, rest in buffers.items():
            await asyncio.to_thread(upload.write, field, bytes(rest))
        await asyncio.to_thread(upload.sync)

    async def _serve(self, upload: AdapterUpload) -> str:
        """Returns the content hash."""
        name = qualify_name(upload.owner, upload.name)
        try:
            async with self._name_locks.of((upload.owner, upload.name)):
                before = self._store.get(upload.owner, upload.name)
                loaded = await self._engine.ask("load", name=name, folder=upload.location, replace=True)
                try:
                    await asyncio.to_thread(upload.commit)
                except SymbiosisError:  # what is not stored is not served
                    if before is None:
                        await self._engine.ask("unload", name=name)
                    else:
                        await self._engine.ask("load", name=name, folder=before.location, replace=True)
                    raise
        except BaseException:
            await asyncio.to_thread(upload.abort)
            raise
        return str(loaded["hash"])

    async def download(self, request: Request) -> Response:
        """One of the two files of the caller's adapter."""
        name, file = self._parse_name(request), request.path_params["file"]
        stored = self._store.get(request.state.caller.owner, name)
        if stored is None or file not in FIELDS.values():
            raise _no_file(name, file)
        folders = self._store.folders
        held = ExitStack()
        folder = await asyncio.to_thread(held.enter_context, folders.hold(folders.find(stored.location)))
        if not (folder / file).exists():  # it may just be replaced
            held.close()
            raise _no_file(name, file)
        return FileResponse(folder / file, media_type="application/octet-stream", background=BackgroundTask(held.close))

    async def remove(self, request: Request) -> Response:
        """The caller's adapter; the admin names a tenant with `?owner=`."""
        caller: Caller = request.state.caller
        owner = request.query_params.get("owner") if caller.is_admin else caller.owner
        name = self._parse_name(request)
        await self._remove(owner, name)
        return JSONResponse({"id": name, "object": "adapter", "deleted": True})

    async def remove_model(self, request: Request) -> Response:
        """`remove`, in OpenAI's format: `id` is a name as in the `model` field."""
        caller: Caller = request.state.caller
        owner = request.query_params.get("owner") if caller.is_admin else caller.owner
        id = request.path_params["id"]
        name = self._names.parse(id)
        if name is None:
            raise Forbidden(f"{id} is the base model, which all tenants share: only adapters can be deleted")
        if re.fullmatch(ADAPTER_NAME, name) is None:
            raise UnknownAdapter(f"there is no adapter {id!r:.80} of yours")
        try:
            await self._remove(owner, name)
        except UnknownAdapter:
            if name in visible_adapters(caller, (await self._engine.ask("stats"))["adapters"]):
                raise Forbidden(f"{id} is not an adapter of yours: only its owner and the admin can delete it") from None
            raise
        return JSONResponse({"id": id, "object": "model", "deleted": True})

    async def load(self, request: Request) -> Response:
        body = await read_json(request, LoadAdapterRequest)
        self._check_not_base(body.lora_name, "lora_name")
        folder = _resolve_path(self._settings.adapter_root, body.lora_path)
        await asyncio.to_thread(self._jobs.supervisor.check_name, None, body.lora_name)
        async with self._name_locks.of((None, body.lora_name)):
            location = await asyncio.to_thread(self._store.provide, body.lora_name, folder)
            await self._engine.ask("load", name=body.lora_name, folder=location, replace=body.load_inplace)
            await asyncio.to_thread(self._store.add_provided, body.lora_name, location)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = await read_json(request, UnloadAdapterRequest)
        await self._remove(None, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def pin(self, request: Request) -> Response:
        body = await read_json(request, PinAdapterRequest)
        await self._engine.ask("pin", name=qualify_name(body.owner, body.lora_name), pinned=body.pinned)
        return JSONResponse({"id": body.lora_name, "object": "adapter", "owner": body.owner, "pinned": body.pinned})

    async def _remove(self, owner: str | None, name: str) -> None:
        async with self._name_locks.of((owner, name)):
            was_stored = await asyncio.to_thread(self._store.remove, owner, name)
            try:
                await self._engine.ask("unload", name=qualify_name(owner, name))
            except UnknownAdapter:
                if not was_stored:
                    raise UnknownAdapter(f"there is no adapter {name!r} of yours") from None

    def _parse_name(self, request: Request) -> str:
        try:
            name = AdapterPath(name=request.path_params["name"]).name
        except ValidationError:
            expected = "1 to 128 letters, digits, dots, dashes and underscores, starting with a letter or digit"
            raise BadRequest(f"invalid name of an adapter: expected {expected}", field="name") from None
        self._check_not_base(name, "name")
        return name

    def _check_not_base(self, name: str, field: str) -> None:
        if self._names.is_model(name):
            what = "the base model" if self._names.is_base(name) else "a model"
            raise BadRequest(f"{name} is the name of {what}: choose another", field=field)


def _no_file(name: str, file: str) -> UnknownAdapter:
    return UnknownAdapter(f"there is no stored adapter {name!r} of yours with a file {file!r:.60}")


def _resolve_path(root: str | None, path: str) -> Path:
    """The folder of a path under the root. Raises `BadAdapter`."""
    if root is None:
        raise BadAdapter("loading adapters is off: start the server with --adapter-root FOLDER")
    base = Path(root).resolve()
    folder = (base / path).resolve()
    if not folder.is_relative_to(base) or folder == base:
        raise BadAdapter("lora_path must lead to a folder inside --adapter-root")
    if not folder.is_dir():
        raise BadAdapter("lora_path: there is no such folder inside --adapter-root")
    return folder
