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
from symbiosis.server.engines.engine import Engine
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer

_CLOSE_TIMEOUT_S = 5.0
_T = TypeVar("_T")


class JobService:
    """One per server. The attributes below exist after `open`."""

    db: Database
    uploads: Uploads
    supervisor: Supervisor
    admission: Admission

    def __init__(
        self, engine: Engine, tokenizer: ServerTokenizer, settings: Settings, store: AdapterStore, count_steps: CountSteps
    ) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._store, self._count_steps = store, count_steps
        self.max_example_len = settings.max_training_len or settings.max_model_len
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Open the folder of jobs and resume them."""
        limits, layout, store = self._settings.job_limits, JobsLayout(Path(self._settings.jobs)), self._store
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
