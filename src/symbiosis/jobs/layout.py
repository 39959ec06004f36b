"""The folder of everything about jobs: the database, uploaded files, and what each job works with.

jobs.sqlite
files/file-…                     as they were uploaded
work/ftjob-…/training.safetensors, validation.safetensors
work/ftjob-…/try-E/step-N        checkpoints of the E-th start
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from symbiosis.jobs.atomic_files import to_disk


class JobsLayout:
    """Owned by one server; who made it holds its lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database, self.files, self._work = root / "jobs.sqlite", root / "files", root / "work"
        for each in (root, self.files, self._work):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            to_disk(each.parent)

    def file(self, id: str) -> Path:
        """`id` is one of ours: it came out of the database."""
        return self.files / id

    def file_ids(self) -> set[str]:
        return {path.name for path in self.files.iterdir()}

    def work(self, job: str) -> Path:
        return self._work / job

    def data(self, job: str, field: str) -> Path:
        return self.work(job) / f"{field.removesuffix('_file')}.safetensors"

    def checkpoints(self, job: str, epoch: int) -> Path:
        return self.work(job) / f"try-{epoch}"

    def remove_work(self, job: str) -> None:
        shutil.rmtree(self.work(job), ignore_errors=True)

    def remove_others(self, *, files: Collection[str], jobs: Collection[str]) -> None:
        """Left over from a process that was killed in mid-work."""
        for path in self.files.iterdir():
            if path.name not in files:
                path.unlink(missing_ok=True)
        for path in self._work.iterdir():
            if path.name not in jobs:
                shutil.rmtree(path, ignore_errors=True)
