"""A job's own copy of its data: validated, tokenized and written before the job is queued.

The files of a job are hard-linked into its folder first, so that the tenant may delete them at any time.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path
from typing import Any

from symbiosis.common.fair_executor import FairExecutor
from symbiosis.errors import NoTokenizer
from symbiosis.jobs import jsonl, plan, tokenized_dataset
from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk
from symbiosis.jobs.errors import BadTrainingFile, UnknownFile, WrongState
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters, TrainingPlan
from symbiosis.jobs.queue import JobLimits

INLINE_BYTES = 1 << 20
"""Files up to this total size are validated before a job is accepted; larger ones while it is `validating_files`."""
_INLINE_TIMEOUT_S = 5.0
"""Long chats take far longer than their size suggests: after this time they are validated in the background."""
_BACKGROUND_TIMEOUT_S = 1800.0
"""A larger file fails: other jobs wait for it."""
FIELDS = ("training_file", "validation_file")


class DataPreparer:
    """Two threads, each with its own tokenizer: inline validation does not wait for the background."""

    def __init__(self, tokenizer: Any, max_tokens: int, layout: JobsLayout, limits: JobLimits) -> None:
        """`max_tokens`: the longest example that the engine trains on."""
        self._max_tokens, self._layout, self._limits = max_tokens, layout, limits
        self._tokenizers = [copy.deepcopy(tokenizer) for _ in range(2)]
        self._workers = [FairExecutor("symbiosis-data") for _ in range(2)]
        self._cancellations: dict[str, threading.Event] = {}  # by job in preparation or waiting for it

    def link_sources(self, job: str, sources: dict[str, Path]) -> int:
        """Link files into the job's folder. Returns their total bytes. Raises `StorageFull` or `UnknownFile`."""
        with map_os_errors():
            folder = self._layout.job_folder(job)
            folder.mkdir(mode=0o700)
            for field, path in sources.items():
                try:
                    os.link(path, self._source_path(job, field))
                except FileNotFoundError:
                    raise UnknownFile(f"{field}: the file was deleted while the job was created: upload it again") from None
            for each in (folder, folder.parent):  # before the job is recorded
                sync_to_disk(each)
            return sum(self._source_path(job, field).stat().st_size for field in sources)

    async def prepare(self, job: str, tenant: str, params: Hyperparameters, seed: int, *, in_background: bool) -> TrainingPlan:
        """Raises `BadTrainingFile`, `BadPlan` or `StorageFull`; `WrongState` after `cancel`.

        Raises `TimeoutError` if it is not `in_background` and takes too long.
        """
        if self._tokenizers[0] is None:
            raise NoTokenizer("this model is served without a tokenizer: training data cannot be tokenized")
        cancelled = self._cancellations[job] = threading.Event()
        try:
            return await self._workers[in_background].run(
                tenant, lambda: self._prepare(job, params, seed, in_background, cancelled)
            )
        finally:
            del self._cancellations[job]

    def cancel(self, job: str) -> None:
        """Does nothing if the job is not in preparation."""
        if job in self._cancellations:
            self._cancellations[job].set()

    def _prepare(
        self, job: str, params: Hyperparameters, seed: int, in_background: bool, cancelled: threading.Event
    ) -> TrainingPlan:
        deadline = time.monotonic() + (_BACKGROUND_TIMEOUT_S if in_background else _INLINE_TIMEOUT_S)

        def check() -> None:
            if cancelled.is_set():
                raise WrongState("the job was cancelled while its data was validated")
            if time.monotonic() <= deadline:
                return
            if not in_background:
                raise TimeoutError
            minutes = f"{_BACKGROUND_TIMEOUT_S / 60:.0f} minutes"
            raise BadTrainingFile(f"tokenizing it takes longer than {minutes}: split it, or its longest chats", field=field)

        length, datasets = plan.resolve_length(params, self._max_tokens), dict[str, tokenized_dataset.DatasetSize]()
        for field in FIELDS:
            source = self._source_path(job, field)
            if not source.exists():
                continue
            samples = jsonl.read_samples(source, field=field, max_examples=self._limits.examples, check=check)
            examples = tokenized_dataset.tokenize_samples(
                samples,
                self._tokenizers[in_background],
                max_length=length.max_length,
                truncate=length.truncate,
                max_tokens=self._limits.tokens,
                field=field,
                check=check,
            )
            datasets[field] = tokenized_dataset.write_dataset(self._layout.dataset_path(job, field), examples)
        return plan.build_plan(
            params,
            length=length,
            examples=datasets["training_file"].examples,
            tokens=sum(size.tokens for size in datasets.values()),
            validates="validation_file" in datasets,
            seed=seed,
            max_steps=self._limits.steps,
            longest=max(size.longest for size in datasets.values()),
        )

    def remove_sources(self, job: str) -> None:
        """Remove the text of a job whose plan is recorded."""
        for field in FIELDS:
            self._source_path(job, field).unlink(missing_ok=True)

    def _source_path(self, job: str, field: str) -> Path:
        return self._layout.job_folder(job) / f"{field}.jsonl"

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
