"""The layout of jobs whose engines share no folder: what they read and write is in the cluster's store.

jobs/JOB/data              training.safetensors, validation.safetensors
jobs/JOB/try-E/step-N      checkpoints of run E

The database, uploaded files and data in preparation stay in the folder of this host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from symbiosis.errors import StoreUnavailable
from symbiosis.jobs.layout import TRAINING, VALIDATION, JobsLayout
from symbiosis.store.artifact_cache import LOCATION, ArtifactCache
from symbiosis.store.artifacts import JOBS

_log = logging.getLogger("symbiosis")


class SharedJobsLayout(JobsLayout):
    """Methods that read or write the store raise `StoreUnavailable`. What cannot be removed is garbage."""

    def __init__(self, root: Path, cache: ArtifactCache) -> None:
        super().__init__(root)
        self.folders, self._store = cache, cache.store

    def place_data(self, job: str) -> tuple[str, str | None]:
        name, (_, validation) = f"{JOBS}/{job}/data", super().place_data(job)
        if not self._store.has(name):
            self._store.put(name, self.job_folder(job), (TRAINING,) if validation is None else (TRAINING, VALIDATION))
        location = f"{LOCATION}{name}"
        return f"{location}/{TRAINING}", None if validation is None else f"{location}/{VALIDATION}"

    def make_run(self, job: str, epoch: int, kept: str | None) -> str:
        for name in self._store.list_artifacts(f"{JOBS}/{job}"):
            if not name.endswith("/data") and f"{LOCATION}{name}" != kept:
                self._store.remove(name)
        return f"{LOCATION}{JOBS}/{job}/try-{epoch}"

    def has_checkpoint(self, location: str) -> bool:
        return location.startswith(LOCATION) and self._store.has(location.removeprefix(LOCATION))

    def remove_checkpoint(self, location: str) -> None:
        self._remove(location.removeprefix(LOCATION))

    def remove_job(self, job: str) -> None:
        super().remove_job(job)
        self._remove(f"{JOBS}/{job}")

    def remove_garbage(self, open_jobs: Callable[[], Collection[str]]) -> None:
        """Remove what the store has of other jobs."""
        found = self._store.list_ids(JOBS)
        for job in found - set(open_jobs()):  # after the list: a job may begin meanwhile
            self._remove(f"{JOBS}/{job}")

    def _remove(self, name: str) -> None:
        try:
            self._store.remove(name)
        except StoreUnavailable as error:
            _log.warning("%s stays in the store for now: %s", name, error)
