"""The routes of files and of fine-tuning jobs. Everybody finds its own only; the admin finds all jobs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from symbiosis.errors import EngineLost, Forbidden
from symbiosis.jobs import plan
from symbiosis.jobs.admission import Admission, JobRequest
from symbiosis.jobs.data_preparation import FIELDS, DataPreparer
from symbiosis.jobs.database import Database, FileRecord, JobRecord
from symbiosis.jobs.errors import UnknownFile
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor
from symbiosis.jobs.uploads import IncomingUpload, Uploads
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.auth import Caller
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.metrics import Metrics
from symbiosis.server.openai.errors import BadRequest, bad_request
from symbiosis.server.openai.job_responses import PURPOSE, checkpoint_body, event_body, file_body, job_body, listed
from symbiosis.server.openai.job_schemas import CreateJobRequest, FilesPage, Page
from symbiosis.server.requests.body import pieces, read_json
from symbiosis.server.requests.multipart import MultipartForm
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer

_PURPOSE_BYTES = 256  # more than any has
_FORM_EXTRA = 64 << 10
_WRITE_AT_ONCE = 1 << 20
_END_S = 5.0
_T = TypeVar("_T")
_KEY = re.compile(r"[\x20-\x7e]{1,255}")


class FineTuningRoutes:
    """Handlers, and what they share once it is open."""

    def __init__(
        self, remote: EngineClient, tokens: ServerTokenizer, settings: Settings, store: AdapterStore | None, metrics: Metrics
    ) -> None:
        self._remote, self._tokens, self._settings, self._store, self._metrics = remote, tokens, settings, store, metrics
        self._records: Database | None = None
        self._ending: set[asyncio.Task[Any]] = set()

    @property
    def _longest(self) -> int:
        return int(self._settings.training.get("longest", self._settings.longest))

    async def open(self) -> None:
        """Jobs go on from where they were."""
        if self._settings.jobs is None or self._store is None:
            return
        limits = self._settings.job_limits
        folder = JobsLayout(Path(self._settings.jobs))
        records = Database(folder.database)
        self._folder, self._files = folder, Uploads(folder, records, limits)
        self._preparer = DataPreparer(self._tokens.tokenizer, self._longest, folder, limits)
        self._supervisor = Supervisor(
            records, folder, self._remote, self._store, self._preparer, limits, self._metrics.count_steps
        )
        self._admission = Admission(
            records, folder, self._preparer, self._supervisor, self._store, limits, self._check_adapters
        )
        await self._supervisor.start()
        self._records = records

    async def close(self) -> None:
        if self._records is not None:
            if self._ending:  # of clients that did not wait
                await asyncio.wait(self._ending, timeout=_END_S)
            await self._supervisor.stop()
            self._records.close()

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        return {} if self._records is None else {state.value: count for state, count in self._records.count().items()}

    async def check_name(self, owner: str | None, name: str) -> None:
        """Raises `NameReserved`."""
        if self._records is not None:
            await asyncio.to_thread(self._supervisor.check_name, owner, name)

    async def promised(self, tenant: str) -> int:
        """Adapters that a tenant's jobs will bring."""
        return 0 if self._records is None else await asyncio.to_thread(self._admission.promised, tenant)

    def _known(self) -> Database:
        if "why" in self._settings.training:
            raise Forbidden(f"this server does no fine-tuning: {self._settings.training['why']}")
        if self._records is None:
            raise Forbidden("this server does no fine-tuning: it was started without a place for it (--jobs FOLDER)")
        if not self._remote.is_alive():  # another process may have taken over what is kept
            raise EngineLost("the serving engine is gone; it may be started again")
        return self._records

    # Files

    async def upload(self, request: Request) -> Response:
        tenant = request.state.caller.tenant
        self._known()
        form = MultipartForm(request.headers.get("content-type", ""), ("file", "purpose"))
        incoming = await self._to_its_end(asyncio.to_thread(self._files.begin, tenant))
        try:
            held, purpose = bytearray(), b""
            async for piece in pieces(request, self._settings.job_limits.file_bytes + _FORM_EXTRA):
                for field, content in form.feed(piece):
                    if field == "purpose":
                        purpose = (purpose + content)[:_PURPOSE_BYTES]
                    else:
                        held += content
                if len(held) >= _WRITE_AT_ONCE:
                    await asyncio.to_thread(incoming.write, bytes(held))
                    held.clear()
            form.finish()
            if purpose.decode("latin-1") != PURPOSE:
                raise BadRequest(f"purpose is {purpose.decode('latin-1')!r:.60}: files are for {PURPOSE!r}", field="purpose")
            await asyncio.to_thread(incoming.write, bytes(held))
            if not incoming.bytes:
                raise BadRequest("the file is empty", field="file")
        except BaseException:
            await self._to_its_end(asyncio.to_thread(incoming.drop))
            raise
        return JSONResponse(file_body(await self._to_its_end(self._keep(incoming, form.filename or "file"))))

    async def _keep(self, incoming: IncomingUpload, filename: str) -> FileRecord:
        try:
            return await asyncio.to_thread(incoming.keep, filename)
        except BaseException:
            await self._to_its_end(asyncio.to_thread(incoming.drop))
            raise

    async def files(self, request: Request) -> Response:
        page = _page(request, FilesPage)
        if page.purpose not in (None, PURPOSE):
            return JSONResponse(listed([], page.limit))
        found = await asyncio.to_thread(
            lambda: self._known().files(
                request.state.caller.tenant, after=page.after, limit=page.limit + 1, oldest_first=page.order == "asc"
            )
        )
        return JSONResponse(listed([file_body(each) for each in found], page.limit))

    async def file(self, request: Request) -> Response:
        _page(request, None)
        found = await asyncio.to_thread(self._known().file, request.path_params["id"], request.state.caller.tenant)
        return JSONResponse(file_body(found))

    async def content(self, request: Request) -> Response:
        _page(request, None)
        self._known()
        path = await asyncio.to_thread(self._files.path, request.path_params["id"], request.state.caller.tenant)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def remove_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._known()
        await asyncio.to_thread(self._files.remove, id, request.state.caller.tenant)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    # Jobs

    async def create(self, request: Request) -> Response:
        self._known()
        caller: Caller = request.state.caller
        wish = await read_json(request, CreateJobRequest, keys_once=True)
        key = _key(request)
        # sorted: the order of keys says nothing, so it makes no other request
        digest = hashlib.sha256(json.dumps(wish.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
        if key is not None and (known := await self._admission.known(caller.tenant, key, digest)) is not None:
            return await self._answer(known)
        if wish.model != self._settings.base:
            raise BadRequest(
                f"{wish.model!r:.80} cannot be fine-tuned here: only the base model, {self._settings.base}, can",
                field="model",
                code="model_not_available",
            )
        wishes = wish.wishes()
        plan.check(wishes)
        plan.length(wishes, self._longest)
        await self._remote.ask("check_adapter", adapter=plan.adapter_of(wishes))
        wanted = JobRequest(
            tenant=caller.tenant,
            owner=caller.owner,
            sources={
                field: self._source(field, getattr(wish, field), caller.tenant) for field in FIELDS if getattr(wish, field)
            },
            said={field: getattr(wish, field) for field in (*FIELDS, "suffix", "metadata")},
            seed=wish.seed,
            wishes=wishes,
            key=key,
            digest=digest,
        )
        return await self._answer(await self._to_its_end(self._admission.admit(wanted)))

    async def _to_its_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What is begun is done, also if the client does not wait for it: half of it would be neither here nor there."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return await asyncio.shield(task)

    def _source(self, field: str, id: str, tenant: str) -> Path:
        try:
            return self._files.path(id, tenant)
        except UnknownFile as error:
            raise BadRequest(str(error), field=field, code="file_not_found") from None

    def _check_adapters(self, owner: str | None, begun: int) -> None:
        """Before one more job than those `begun`: each will bring an adapter."""
        assert self._store is not None
        self._store.check_count(owner, begun + 1)
        self._store.check_bytes(owner)

    async def jobs(self, request: Request) -> Response:
        page, records = _page(request, Page), self._known()
        tenant = _scope(request.state.caller)
        found, positions = await asyncio.to_thread(
            lambda: (records.jobs(tenant, after=page.after, limit=page.limit + 1), self._supervisor.positions())
        )
        bodies = [job_body(job, self._settings.base, positions.get(job.id)) for job in found]
        return JSONResponse(listed(bodies, page.limit))

    async def job(self, request: Request) -> Response:
        _page(request, None)
        return await self._answer(await self._mine(request))

    async def cancel(self, request: Request) -> Response:
        supervisor, job = self._supervisor_of(request), await self._mine(request)
        return await self._answer(await self._to_its_end(supervisor.cancel(job.id)))

    async def pause(self, request: Request) -> Response:
        supervisor, job = self._supervisor_of(request), await self._mine(request)
        return await self._answer(await self._to_its_end(supervisor.pause(job.id)))

    async def resume(self, request: Request) -> Response:
        supervisor, job = self._supervisor_of(request), await self._mine(request)
        return await self._answer(await self._to_its_end(supervisor.resume(job.id)))

    def _supervisor_of(self, request: Request) -> Supervisor:
        self._known()
        _page(request, None)
        return self._supervisor

    async def events(self, request: Request) -> Response:
        page, job = _page(request, Page), await self._mine(request)
        after = _number(page.after, "ftevent-")
        found = await asyncio.to_thread(lambda: self._known().events(job, after=after, limit=page.limit + 1))
        return JSONResponse(listed([event_body(each) for each in found], page.limit))

    async def checkpoints(self, request: Request) -> Response:
        page, job = _page(request, Page), await self._mine(request)
        after = _number(page.after, "ftckpt-")
        found = await asyncio.to_thread(lambda: self._known().checkpoints(job, after=after, limit=page.limit + 1))
        return JSONResponse(listed([checkpoint_body(each, job) for each in found], page.limit))

    async def _mine(self, request: Request) -> JobRecord:
        return await asyncio.to_thread(self._known().job, request.path_params["id"], _scope(request.state.caller))

    async def _answer(self, job: JobRecord) -> Response:
        positions = await asyncio.to_thread(self._supervisor.positions) if job.state is JobState.QUEUED else {}
        return JSONResponse(job_body(job, self._settings.base, positions.get(job.id)))


def _scope(caller: Caller) -> str | None:
    return None if caller.is_admin else caller.tenant


def _key(request: Request) -> str | None:
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1 or not all(_KEY.fullmatch(key) for key in keys):
        raise BadRequest("Idempotency-Key: expected one, of 1 to 255 plain ASCII characters", field="Idempotency-Key")
    return keys[0] if keys else None


def _number(id: str | None, prefix: str) -> int | None:
    if id is None:
        return None
    if not re.fullmatch(rf"{prefix}[0-9]{{1,18}}", id):
        raise BadRequest(f"after: {id!r:.60} is no id of this list, which are {prefix}…", field="after")
    return int(id.removeprefix(prefix))


def _page(request: Request, schema: type[Any] | None) -> Any:
    """The query by its schema; None: there is nothing to ask."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if schema is None or name not in schema.model_fields or name in given:
            raise BadRequest(f"{name!r:.60} is not supported here: leave it out", field=name[:60], code="unsupported_parameter")
        given[name] = int(value) if name == "limit" and re.fullmatch(r"-?[0-9]{1,18}", value) else value
    if schema is None:
        return None
    try:
        return schema(**given)
    except ValidationError as error:
        raise bad_request(error) from None
