"""/v1/files: upload, listing, download and removal of training files and results of jobs. A tenant sees only its own."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from symbiosis.server.job_service import JobService
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.openai.job_responses import PURPOSE, RESULTS_PURPOSE, file_body, list_body
from symbiosis.server.openai.job_schemas import FilesPage
from symbiosis.server.requests.body import read_chunks
from symbiosis.server.requests.multipart import MultipartForm
from symbiosis.server.requests.query import read_query, reject_query
from symbiosis.server.settings import Settings

_MAX_PURPOSE_BYTES = 256
_FORM_BYTES = 64 << 10
"""Most bytes of a form besides the file."""
_WRITE_BYTES = 1 << 20


class FileRoutes:
    def __init__(self, settings: Settings, jobs: JobService) -> None:
        self._max_bytes, self._jobs = settings.job_limits.file_bytes + _FORM_BYTES, jobs

    async def upload(self, request: Request) -> Response:
        self._jobs.check()
        form = MultipartForm(request.headers.get("content-type", ""), ("file", "purpose"))
        upload = await self._jobs.finish(asyncio.to_thread(self._jobs.uploads.open, request.state.caller.tenant))
        try:
            buffer, purpose = bytearray(), b""
            async for chunk in read_chunks(request, self._max_bytes):
                for field, content in form.feed(chunk):
                    if field == "purpose":
                        purpose = (purpose + content)[:_MAX_PURPOSE_BYTES]
                    else:
                        buffer += content
                if len(buffer) >= _WRITE_BYTES:
                    await asyncio.to_thread(upload.write, bytes(buffer))
                    buffer.clear()
            form.finish()
            if purpose.decode("latin-1") != PURPOSE:
                raise BadRequest(f"purpose is {purpose.decode('latin-1')!r:.60}: expected {PURPOSE!r}", field="purpose")
            await asyncio.to_thread(upload.write, bytes(buffer))
            if not upload.bytes:
                raise BadRequest("the file is empty", field="file")
        except BaseException:
            await self._jobs.finish(asyncio.to_thread(upload.abort))
            raise
        record = await self._jobs.finish(asyncio.to_thread(upload.commit, form.filename or "file"))
        return JSONResponse(file_body(record))

    async def list(self, request: Request) -> Response:
        page, tenant = read_query(request, FilesPage), request.state.caller.tenant
        if page.purpose not in (None, PURPOSE, RESULTS_PURPOSE):
            return JSONResponse(list_body([], page.limit))
        self._jobs.check()
        oldest_first, results = page.order == "asc", None if page.purpose is None else page.purpose == RESULTS_PURPOSE
        files = await asyncio.to_thread(
            lambda: self._jobs.db.list_files(
                tenant, after=page.after, limit=page.limit + 1, oldest_first=oldest_first, results=results
            )
        )
        return JSONResponse(list_body([file_body(file) for file in files], page.limit))

    async def get(self, request: Request) -> Response:
        reject_query(request)
        self._jobs.check()
        file = await asyncio.to_thread(self._jobs.db.get_file, request.path_params["id"], request.state.caller.tenant)
        return JSONResponse(file_body(file))

    async def download(self, request: Request) -> Response:
        reject_query(request)
        self._jobs.check()
        path = await asyncio.to_thread(self._jobs.uploads.path, request.path_params["id"], request.state.caller.tenant)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def remove(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._jobs.check()
        await asyncio.to_thread(self._jobs.uploads.remove, id, request.state.caller.tenant)
        return JSONResponse({"id": id, "object": "file", "deleted": True})
