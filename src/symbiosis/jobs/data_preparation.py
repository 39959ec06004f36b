"""A job's own copy of its data: checked, tokenised and written before it waits for its turn.

The files of a job are linked into its folder first, so that their owner may delete them at any time.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from symbiosis.errors import NoTokenizer
from symbiosis.jobs import jsonl, plan, tokenized_dataset
from symbiosis.jobs.atomic_files import to_disk, told
from symbiosis.jobs.errors import BadTrainingFile, UnknownFile, WrongState
from symbiosis.jobs.fair_lock import FairLock
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters, TrainingPlan
from symbiosis.jobs.queue import JobLimits

AT_ONCE = 1 << 20
"""Files of so many bytes together are checked before a job is accepted; larger ones while it is `validating_files`."""
_AT_ONCE_S = 5.0
"""And no longer than this: a chat of many turns takes far longer than its size tells."""
_LARGE_S = 1800.0
"""And a large file no longer than this: others wait for it."""
FIELDS = ("training_file", "validation_file")


@dataclass(frozen=True, slots=True)
class PreparedData:
    plan: TrainingPlan
    files: dict[str, tokenized_dataset.TokenizedDataset]


class DataPreparer:
    """Two threads, each with a tokenizer of its own: small files do not wait for large ones. Of these, tenants take turns."""

    def __init__(self, tokenizer: Any, longest: int, folder: JobsLayout, limits: JobLimits) -> None:
        self._longest, self._folder, self._limits = longest, folder, limits
        self._tokenizers = [copy.deepcopy(tokenizer) for _ in range(2)]
        self._workers = [ThreadPoolExecutor(1, thread_name_prefix="symbiosis-data") for _ in range(2)]
        self._turn = FairLock()
        self._given_up: dict[str, threading.Event] = {}  # by job that is being read, or waits for that

    def take(self, job: str, sources: dict[str, Path]) -> int:
        """Link files into the job's folder; their bytes. Raises `StorageFull`, or `UnknownFile` if one is no more."""
        with told():
            self._folder.work(job).mkdir(mode=0o700)
            for field, path in sources.items():
                try:
                    os.link(path, self._source(job, field))
                except FileNotFoundError:
                    raise UnknownFile(f"{field}: the file was deleted while the job was made: upload it again") from None
            for each in (self._folder.work(job), self._folder.work(job).parent):  # before the job is recorded
                to_disk(each)
            return sum(self._source(job, field).stat().st_size for field in sources)

    async def prepare(self, job: str, tenant: str, wishes: Hyperparameters, seed: int, *, large: bool) -> PreparedData:
        """Raises `BadTrainingFile`, `BadPlan` or `StorageFull`; if it is not to be `large`, but takes long, `TimeoutError`.

        `WrongState` once the job was given up.
        """
        if self._tokenizers[0] is None:
            raise NoTokenizer("this model was served without a tokenizer: no training data can be read")
        loop = asyncio.get_running_loop()
        given_up = self._given_up[job] = threading.Event()
        work = partial(self._prepare, self._tokenizers[large], job, wishes, seed, large, given_up)
        try:
            async with self._turn.of(tenant) if large else nullcontext():
                return await loop.run_in_executor(self._workers[large], work)
        finally:
            del self._given_up[job]

    def give_up(self, job: str) -> None:
        """Nobody wants it any more: others' files do not wait for it. Nothing happens if it is not being read."""
        if job in self._given_up:
            self._given_up[job].set()

    def _prepare(
        self, tokenizer: Any, job: str, wishes: Hyperparameters, seed: int, large: bool, given_up: threading.Event
    ) -> PreparedData:
        until = time.monotonic() + (_LARGE_S if large else _AT_ONCE_S)

        def check() -> None:
            if given_up.is_set():
                raise WrongState("the job was ended while its data was read")
            if time.monotonic() <= until:
                return
            if not large:
                raise TimeoutError
            most = f"{_LARGE_S / 60:.0f} minutes"
            raise BadTrainingFile(f"reading it takes longer than {most}: split it, or its longest chats", field=field)

        allowed, found = plan.length(wishes, self._longest), dict[str, tokenized_dataset.TokenizedDataset]()
        for field in FIELDS:
            source = self._source(job, field)
            if not source.exists():
                continue
            samples = jsonl.read(source, field=field, max_examples=self._limits.examples, check=check)
            examples, cut = tokenized_dataset.encode(
                samples,
                tokenizer,
                max_length=allowed.max_length,
                truncate=allowed.truncate,
                max_tokens=self._limits.tokens,
                field=field,
                check=check,
            )
            made = tokenized_dataset.write(self._folder.data(job, field), examples)
            found[field] = tokenized_dataset.TokenizedDataset(made.examples, made.tokens, cut)
        count = found["training_file"].examples
        decided = plan.make(
            wishes,
            allowed=allowed,
            examples=count,
            tokens=sum(each.tokens for each in found.values()),
            validates="validation_file" in found,
            seed=seed,
            max_steps=self._limits.steps,
        )
        return PreparedData(decided, found)

    def release(self, job: str) -> None:
        """The plan is recorded: the text is not needed any more."""
        for field in FIELDS:
            self._source(job, field).unlink(missing_ok=True)

    def _source(self, job: str, field: str) -> Path:
        return self._folder.work(job) / f"{field}.jsonl"

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=False, cancel_futures=True)
