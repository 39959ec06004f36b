"""Routes with a state: adapters, files, fine-tuning jobs, models, statistics. One process has them, the control process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from symbiosis.errors import StoreUnavailable
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.engines.engine import Engine
from symbiosis.server.job_service import JobService
from symbiosis.server.metrics.counts import Metrics
from symbiosis.server.requests.body import Handler
from symbiosis.server.routes.adapters import AdapterRoutes
from symbiosis.server.routes.description import DescriptionRoutes
from symbiosis.server.routes.files import FileRoutes
from symbiosis.server.routes.fine_tuning import FineTuningRoutes
from symbiosis.server.routes.models import ModelRoutes
from symbiosis.server.routes.statistics import StatisticsRoutes
from symbiosis.server.settings import Settings
from symbiosis.server.shared_adapters import SharedAdapterStore
from symbiosis.server.tokenizer import ServerTokenizer

_RETRY_S = 5.0
_COLLECT_S = 3600.0
_log = logging.getLogger("symbiosis")


class Control:
    """The owner of stored adapters and jobs."""

    def __init__(self, engine: Engine, tokenizer: ServerTokenizer, settings: Settings, metrics: Metrics) -> None:
        self._engine, self._settings = engine, settings
        cache = self._cache = None if settings.store is None else settings.store.open()
        if cache is None:
            self._store = AdapterStore(Path(settings.uploads), settings.store_limits)
        else:
            self._store = SharedAdapterStore(cache, settings.store_limits)
        self._jobs = JobService(engine, tokenizer, settings, self._store, cache, metrics.count_steps)
        self._collection: asyncio.Task[None] | None = None

    def table(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler of each route."""
        engine, settings = self._engine, self._settings
        statistics = StatisticsRoutes(engine)
        models = ModelRoutes(engine, settings)
        adapters = AdapterRoutes(engine, settings, self._store, self._jobs)
        files = FileRoutes(settings, self._jobs)
        tuning = FineTuningRoutes(engine, settings, self._jobs)
        return [
            ("GET", "/metrics", statistics.metrics),
            ("GET", "/v1/statistics", statistics.get),
            ("GET", "/v1/models", models.list),
            ("GET", "/v1/models/{id:path}", models.get),
            ("DELETE", "/v1/models/{id:path}", adapters.remove_model),
            ("GET", "/v1/adapters", adapters.list),
            ("PUT", "/v1/adapters/{name}", adapters.upload),
            ("DELETE", "/v1/adapters/{name}", adapters.remove),
            ("GET", "/v1/adapters/{name}/{file}", adapters.download),
            ("POST", "/v1/files", files.upload),
            ("GET", "/v1/files", files.list),
            ("GET", "/v1/files/{id}", files.get),
            ("DELETE", "/v1/files/{id}", files.remove),
            ("GET", "/v1/files/{id}/content", files.download),
            ("POST", "/v1/fine_tuning/jobs", tuning.create),
            ("GET", "/v1/fine_tuning/jobs", tuning.list),
            ("GET", "/v1/fine_tuning/jobs/{id}", tuning.get),
            ("POST", "/v1/fine_tuning/jobs/{id}/cancel", tuning.cancel),
            ("POST", "/v1/fine_tuning/jobs/{id}/pause", tuning.pause),
            ("POST", "/v1/fine_tuning/jobs/{id}/resume", tuning.resume),
            ("GET", "/v1/fine_tuning/jobs/{id}/events", tuning.list_events),
            ("GET", "/v1/fine_tuning/jobs/{id}/checkpoints", tuning.list_checkpoints),
            ("POST", "/v1/load_lora_adapter", adapters.load),
            ("POST", "/v1/unload_lora_adapter", adapters.unload),
            ("POST", "/v1/pin_lora_adapter", adapters.pin),
        ]

    def describe(self, table: Sequence[tuple[str, str, Handler]]) -> list[tuple[str, str, Handler]]:
        """Routes about all routes of a table."""
        description = DescriptionRoutes(table)
        return [("GET", "/version", description.version), ("GET", "/openapi.json", description.openapi)]

    async def count_jobs(self) -> list[tuple[str, str, int]]:
        """Tenant, state and number of jobs."""
        return await asyncio.to_thread(self._jobs.db.count_jobs)

    async def open(self) -> None:
        """Waits while a cluster's store is unavailable."""
        while True:
            try:
                await asyncio.to_thread(self._store.open)
                break
            except StoreUnavailable as error:
                _log.warning("adapters and jobs wait for the store: %s", error)
            await asyncio.sleep(_RETRY_S)
        await self._jobs.open()
        if self._cache is not None:
            self._collection = asyncio.create_task(self._collect_garbage())

    async def close(self) -> None:
        if self._collection is not None:
            self._collection.cancel()
        await self._jobs.close()
        if self._cache is not None:
            self._cache.close()

    async def _collect_garbage(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._jobs.remove_garbage)
            except StoreUnavailable as error:
                _log.warning("garbage stays in the store for now: %s", error)
            except Exception:  # noqa: BLE001 - the next time may do
                _log.exception("the store's garbage could not be collected")
            await asyncio.sleep(_COLLECT_S)
