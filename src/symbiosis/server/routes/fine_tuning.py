"""/v1/fine_tuning/jobs. A tenant sees only its own jobs; the admin sees all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.jobs import plan
from symbiosis.jobs.admission import JobRequest
from symbiosis.jobs.data_preparation import FIELDS
from symbiosis.jobs.database import JobRecord
from symbiosis.jobs.errors import UnknownFile
from symbiosis.jobs.states import JobState
from symbiosis.server.auth import Caller
from symbiosis.server.engines.engine import Engine
from symbiosis.server.job_service import JobService
from symbiosis.server.model_names import ModelNames
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.openai.job_responses import Body, checkpoint_body, event_body, job_body, list_body
from symbiosis.server.openai.job_schemas import CreateJobRequest, Page
from symbiosis.server.requests.body import read_json
from symbiosis.server.requests.query import read_query, reject_query
from symbiosis.server.settings import Settings

Bodies = list[Body]
_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")


class FineTuningRoutes:
    def __init__(self, engine: Engine, settings: Settings, jobs: JobService) -> None:
        self._engine, self._base, self._jobs = engine, settings.base, jobs
        self._names = ModelNames(settings.base, settings.hub_id, settings.models)

    async def create(self, request: Request) -> Response:
        self._jobs.check()
        caller: Caller = request.state.caller
        body = await read_json(request, CreateJobRequest, unique_keys=True)
        key = _read_idempotency_key(request)
        # Sorted: the order of keys does not make a different request.
        digest = hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
        if key is not None and (job := await self._jobs.admission.find_existing(caller.tenant, key, digest)) is not None:
            return await self._respond(job)
        if not self._names.is_base(body.model):
            message = f"{body.model!r:.80} cannot be fine-tuned here: expected the base model, {self._base}"
            raise BadRequest(message, field="model", code="model_not_available")
        params = body.to_hyperparameters()
        plan.check_hyperparameters(params)
        plan.resolve_length(params, self._jobs.max_example_len)
        await self._engine.ask("check_adapter", adapter=plan.build_adapter_config(params))
        files = {field: getattr(body, field) for field in FIELDS}
        job_request = JobRequest(
            tenant=caller.tenant,
            owner=caller.owner,
            sources={field: self._find_file(field, id, caller.tenant) for field, id in files.items() if id},
            fields={**files, "suffix": body.suffix, "metadata": body.metadata},
            seed=body.seed,
            params=params,
            key=key,
            digest=digest,
        )
        return await self._respond(await self._jobs.finish(self._jobs.admission.admit(job_request)))

    def _find_file(self, field: str, id: str, tenant: str) -> Path:
        try:
            return self._jobs.uploads.path(id, tenant)
        except UnknownFile as error:
            raise BadRequest(str(error), field=field, code="file_not_found") from None

    async def list(self, request: Request) -> Response:
        page, db, tenant = read_query(request, Page), self._jobs.db, _scope(request.state.caller)
        self._jobs.check()
        jobs = await asyncio.to_thread(lambda: db.list_jobs(tenant, after=page.after, limit=page.limit + 1))
        return JSONResponse(list_body(await asyncio.to_thread(self._bodies, jobs), page.limit))

    async def get(self, request: Request) -> Response:
        reject_query(request)
        return await self._respond(await self._find_job(request))

    async def cancel(self, request: Request) -> Response:
        return await self._change(request, self._jobs.supervisor.cancel)

    async def pause(self, request: Request) -> Response:
        return await self._change(request, self._jobs.supervisor.pause)

    async def resume(self, request: Request) -> Response:
        return await self._change(request, self._jobs.supervisor.resume)

    async def _change(self, request: Request, change: Callable[[str], Coroutine[Any, Any, JobRecord]]) -> Response:
        self._jobs.check()
        reject_query(request)
        job = await self._find_job(request)
        return await self._respond(await self._jobs.finish(change(job.id)))

    async def list_events(self, request: Request) -> Response:
        page, job = read_query(request, Page), await self._find_job(request)
        after = _parse_number(page.after, "ftevent-")
        events = await asyncio.to_thread(lambda: self._jobs.db.list_events(job, after=after, limit=page.limit + 1))
        return JSONResponse(list_body([event_body(event) for event in events], page.limit))

    async def list_checkpoints(self, request: Request) -> Response:
        page, job = read_query(request, Page), await self._find_job(request)
        after = _parse_number(page.after, "ftckpt-")
        checkpoints = await asyncio.to_thread(lambda: self._jobs.db.list_checkpoints(job, after=after, limit=page.limit + 1))
        return JSONResponse(list_body([checkpoint_body(each, job) for each in checkpoints], page.limit))

    async def _find_job(self, request: Request) -> JobRecord:
        self._jobs.check()
        return await asyncio.to_thread(self._jobs.db.get_job, request.path_params["id"], _scope(request.state.caller))

    async def _respond(self, job: JobRecord) -> Response:
        return JSONResponse((await asyncio.to_thread(self._bodies, [job]))[0])

    def _bodies(self, jobs: Sequence[JobRecord]) -> Bodies:
        is_queued = any(job.state is JobState.QUEUED for job in jobs)
        positions = self._jobs.supervisor.queue_positions() if is_queued else {}
        results = self._jobs.db.find_result_files(jobs)
        return [job_body(job, self._base, positions.get(job.id), results.get(job.id)) for job in jobs]


def _scope(caller: Caller) -> str | None:
    """The tenant whose jobs the caller sees; None: all."""
    return None if caller.is_admin else caller.tenant


def _read_idempotency_key(request: Request) -> str | None:
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1 or not all(_IDEMPOTENCY_KEY.fullmatch(key) for key in keys):
        raise BadRequest("Idempotency-Key: expected one, of 1 to 255 printable ASCII characters", field="Idempotency-Key")
    return keys[0] if keys else None


def _parse_number(id: str | None, prefix: str) -> int | None:
    if id is None:
        return None
    if not re.fullmatch(rf"{prefix}[0-9]{{1,18}}", id):
        raise BadRequest(f"after: {id!r:.60} is not an id of this list: expected {prefix}…", field="after")
    return int(id.removeprefix(prefix))
