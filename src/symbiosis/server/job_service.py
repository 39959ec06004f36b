"""The fine-tuning part of the server: opens the database, the supervisor and the admission of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from symbiosis.errors import EngineLost, Forbidden
from symbiosis.jobs.admission import Admission
from symbiosis.jobs.data_preparation import DataPreparer
from symbiosis.jobs.database import Database
from symbiosis.jobs.event_recorder import CountSteps
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.supervisor import Supervisor
from symbiosis.jobs.uploads import Uploads
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer

_CLOSE_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class JobService:
    """One per server. The attributes below exist after `open`, if `require_db` returns."""

    supervisor: Supervisor
    admission: Admission
    uploads: Uploads

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ServerTokenizer,
        settings: Settings,
        store: AdapterStore | None,
        count_steps: CountSteps,
    ) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._store, self._count_steps = store, count_steps
        self.max_example_len = settings.max_training_len or settings.max_model_len
        self._db: Database | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Open the folder of jobs and resume them, if the server has one."""
        if self._settings.jobs is None or self._store is None:
            return
        limits, layout = self._settings.job_limits, JobsLayout(Path(self._settings.jobs))
        db = Database(layout.database_path)
        preparer = DataPreparer(self._tokenizer.tokenizer, self.max_example_len, layout, limits)
        self.uploads = Uploads(layout, db, limits)
        self.supervisor = Supervisor(db, layout, self._engine, self._store, preparer, limits, self._count_steps)
        self.admission = Admission(db, layout, preparer, self.supervisor, self._store, limits, self._check_adapters)
        await self.supervisor.start()
        self._db = db

    async def close(self) -> None:
        if self._db is not None:
            if self._unfinished:
                await asyncio.wait(self._unfinished, timeout=_CLOSE_TIMEOUT_S)
            await self.supervisor.stop()
            self._db.close()

    def require_db(self) -> Database:
        """Raises `Forbidden` if the server does no fine-tuning, `EngineLost` if the engine is lost."""
        if self._settings.training_error is not None:
            raise Forbidden(f"this server does no fine-tuning: {self._settings.training_error}")
        if self._db is None:
            raise Forbidden("this server does no fine-tuning: start it with a folder for jobs (--jobs FOLDER)")
        if not self._engine.is_alive():  # another process may own the folder by now
            raise EngineLost("the serving engine is lost; it may be started again")
        return self._db

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end, even if the client disconnects: a half-done change would be inconsistent."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    def count_by_state(self) -> dict[str, int]:
        return {} if self._db is None else {state.value: count for state, count in self._db.count_by_state().items()}

    async def check_name(self, owner: str | None, name: str) -> None:
        """Raises `NameReserved` if a job will give this name to its adapter."""
        if self._db is not None:
            await asyncio.to_thread(self.supervisor.check_name, owner, name)

    async def count_expected_adapters(self, tenant: str) -> int:
        """Adapters that a tenant's jobs will add."""
        return 0 if self._db is None else await asyncio.to_thread(self.admission.count_expected_adapters, tenant)

    def _check_adapters(self, owner: str | None, open_jobs: int) -> None:
        """Raises `QuotaExceeded` if one more job than `open_jobs` exceeds the quota of adapters."""
        assert self._store is not None
        self._store.check_count(owner, open_jobs + 1)
        self._store.check_bytes(owner)
