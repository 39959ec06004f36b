"""Folder layout of fine-tuning jobs.

jobs.sqlite                      the database
files/file-…                     uploaded files, and result files of jobs
work/ftjob-…/training.safetensors, validation.safetensors
work/ftjob-…/try-E/step-N        checkpoints of run E
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk
from symbiosis.store.artifact_folders import ArtifactFolders, LocalFolders

TRAINING, VALIDATION = "training.safetensors", "validation.safetensors"
RESULT_PREFIX = "file-ftjob-"
"""Of the ids of result files; uploaded files have hexadecimal digits after `file-`."""


def result_file_id(job: str) -> str:
    return f"file-{job}"


class JobsLayout:
    """Paths under one root. The server process that creates it holds the folder's lock.

    Datasets and checkpoints are at *locations*, which the engine gets and returns (`store.artifact_folders`): here paths.
    """

    folders: ArtifactFolders = LocalFolders()

    def __init__(self, root: Path) -> None:
        self.database_path, self.files, self._work = root / "jobs.sqlite", root / "files", root / "work"
        for folder in (root, self.files, self._work):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_to_disk(folder.parent)

    def file_path(self, id: str) -> Path:
        """`id` must come from the database, never from a request."""
        return self.files / id

    def file_ids(self) -> set[str]:
        return {path.name for path in self.files.iterdir()}

    def remove_files(self, ids: Iterable[str]) -> None:
        """Remove the contents of files without a record."""
        for id in ids:
            self.file_path(id).unlink(missing_ok=True)

    def job_folder(self, job: str) -> Path:
        return self._work / job

    def dataset_path(self, job: str, field: str) -> Path:
        return self.job_folder(job) / f"{field.removesuffix('_file')}.safetensors"

    def place_data(self, job: str) -> tuple[str, str | None]:
        """The locations of a job's training data, and of its validation data."""
        folder = self.job_folder(job)
        return str(folder / TRAINING), str(folder / VALIDATION) if (folder / VALIDATION).exists() else None

    def make_run(self, job: str, epoch: int, kept: str | None) -> str:
        """The location of a run's checkpoints. Those of earlier runs but `kept` are removed. Raises `StorageFull`."""
        folder, last = self.job_folder(job) / f"try-{epoch}", None if kept is None else Path(kept).parent
        for each in self.job_folder(job).glob("try-*"):
            if each != last:
                shutil.rmtree(each, ignore_errors=True)
        with map_os_errors():
            folder.mkdir(exist_ok=True)
            sync_to_disk(folder.parent)
        return str(folder)

    def has_checkpoint(self, location: str) -> bool:
        return Path(location).is_dir()

    def remove_checkpoint(self, location: str) -> None:
        shutil.rmtree(location, ignore_errors=True)

    def remove_job(self, job: str) -> None:
        shutil.rmtree(self.job_folder(job), ignore_errors=True)

    def remove_garbage(self, open_jobs: Callable[[], Collection[str]]) -> None:
        """Remove what a shared store has of other jobs: here there is none."""

    def remove_unknown(self, *, files: Collection[str], jobs: Collection[str]) -> None:
        """Remove everything but these: a killed process may leave files without a record."""
        for path in self.files.iterdir():
            if path.name not in files:
                path.unlink(missing_ok=True)
        for path in self._work.iterdir():
            if path.name not in jobs:
                shutil.rmtree(path, ignore_errors=True)
