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
from symbiosis.jobs.shared_layout import SharedJobsLayout
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor
from symbiosis.jobs.uploads import Uploads
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.engines.engine import Engine
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer
from symbiosis.store.artifact_cache import ArtifactCache

_CLOSE_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class JobService:
    """One per server. The attributes below exist after `open`."""

    db: Database
    uploads: Uploads
    supervisor: Supervisor
    admission: Admission

    def __init__(
        self,
        engine: Engine,
        tokenizer: ServerTokenizer,
        settings: Settings,
        store: AdapterStore,
        cache: ArtifactCache | None,
        count_steps: CountSteps,
    ) -> None:
        """`cache`: of a cluster's store."""
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._store, self._cache, self._count_steps = store, cache, count_steps
        self.max_example_len = settings.max_training_len or settings.max_model_len
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Open the folder of jobs and resume them."""
        limits, store, root = self._settings.job_limits, self._store, Path(self._settings.jobs)
        layout = self._layout = JobsLayout(root) if self._cache is None else SharedJobsLayout(root, self._cache)
        db = self.db = Database(layout.database_path)
        preparer = DataPreparer(self._tokenizer.tokenizer, self.max_example_len, layout, limits)
        self.uploads = Uploads(layout, db, limits)
        self.supervisor = Supervisor(db, layout, self._engine, store, preparer, limits, self._count_steps)
        self.admission = Admission(db, layout, preparer, self.supervisor, store, limits)
        await self.supervisor.start()

    async def close(self) -> None:
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=_CLOSE_TIMEOUT_S)
        await self.supervisor.stop()
        self.db.close()

    def remove_garbage(self) -> None:
        """Remove what nothing refers to in a cluster's store. Raises `StoreUnavailable`."""
        self._store.remove_garbage(self._list_open)
        self._layout.remove_garbage(self._list_open)

    def _list_open(self) -> set[str]:
        unfinished = self.db.list_jobs_in(*(state for state in JobState if not state.is_end))
        return self.supervisor.busy_jobs() | {job.id for job in unfinished}

    def check(self) -> None:
        """Raises `Forbidden` if the server does no fine-tuning, `EngineLost` if the engine is lost."""
        if self._settings.training_error is not None:
            raise Forbidden(f"this server does no fine-tuning: {self._settings.training_error}")
        if not self._engine.is_alive():  # another process may own the folder by now
            raise EngineLost("the serving engine is lost; it may be started again")

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end, even if the client disconnects: a half-done change would be inconsistent."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)
