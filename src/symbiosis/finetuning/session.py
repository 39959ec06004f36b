"""A training session: an adapter, its optimizer, and calls that run in their order."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from symbiosis.adapters.files import quote
from symbiosis.errors import CannotServe, OutOfRange
from symbiosis.finetuning.adapters.trained_adapter import NO_ADAPTER, AdapterSnapshot, TrainedAdapter
from symbiosis.finetuning.call_queue import CallQueue
from symbiosis.finetuning.calls import (
    ForwardBackward,
    LoadCheckpoint,
    LossResult,
    OptimStep,
    SampleCall,
    SaveCheckpoint,
    SessionCall,
    StepResult,
)
from symbiosis.finetuning.checkpoint import Progress
from symbiosis.finetuning.dataset import Dataset
from symbiosis.finetuning.examples import Example, check_examples
from symbiosis.finetuning.optimizer import Optimizer, StepSettings, create_optimizer
from symbiosis.finetuning.packed.batch import PackedExample, count_target_tokens
from symbiosis.finetuning.sampler_protocol import SampledCompletion, SamplerProtocol

Submit: TypeAlias = Callable[["TrainingSession", SessionCall, int | None], Future[Any]]

_MIN_COST_ROWS = 16
"""Least cost of a sequence: attention, dropout and loss process each sequence by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    vocabulary: int
    max_rows: int
    """Of one example in a pass, virtual tokens included."""
    max_positions: int
    """Of one sequence in the model, virtual tokens included."""
    max_examples: int
    """Of one batch."""
    max_tokens: int
    """Of one batch."""


class TrainingSession:
    """Every call is thread-safe and returns a future at once.

    A call may carry a number, from 1 on; a repeated number returns the first call's future. An invalid call raises
    `OutOfRange`. A loss or gradient that is not finite ends the session: pending and later calls fail with `Diverged`.
    """

    def __init__(
        self,
        id: str,
        tenant: str,
        adapter: TrainedAdapter,
        *,
        seed: int,
        weight: float,
        takes_items: bool,
        limits: SessionLimits,
        queue: CallQueue,
        sampler: SamplerProtocol | None,
        changed: threading.Condition,
        submit: Submit,
        close: Callable[[TrainingSession], None],
    ) -> None:
        self.id, self.tenant, self.weight, self.seed = id, tenant, weight, seed
        self.adapter, self.optimizer = adapter, create_optimizer(adapter.parameters, adapter.flat)
        self.parameter_count = adapter.size
        self.takes_items = takes_items
        """Whether Trainer divides the losses of all batches of a step by the labels of all of them."""
        self.progress = Progress()
        self.queue = queue
        self.file_task: Future[None] | None = None
        """The last save or load."""
        self.background_call: SessionCall | None = None
        """A call that runs outside of passes; while it is the head of the queue, no pass uses this session."""
        self._is_held = False
        self._limits, self._sampler = limits, sampler
        self._changed, self._submit, self._close = changed, submit, close

    def forward_backward(
        self, batch: Sequence[Example], *, items: float | None = None, number: int | None = None
    ) -> Future[LossResult]:
        """Add a batch's gradient to the accumulated gradient.

        The loss is the mean over the batch's labels, as `model(**batch).loss`. With `items`, it is their sum divided by
        that: Trainer passes the labels of all batches of a step (`num_items_in_batch`).
        """
        return self._submit(self, self._create_batch(batch, items, learns=True), number)

    def forward(self, batch: Sequence[Example], *, items: float | None = None, number: int | None = None) -> Future[LossResult]:
        """A batch's loss with the current adapter, without dropout and gradients."""
        return self._submit(self, self._create_batch(batch, items, learns=False), number)

    def _create_batch(self, batch: Sequence[Example], items: float | None, *, learns: bool) -> ForwardBackward:
        if not isinstance(batch, Iterable):
            raise OutOfRange(f"batch is {quote(batch)}", field="batch", expected="a list of Example(ids, labels)")
        examples, adapter, limits = tuple(batch), self.adapter, self._limits
        if not 1 <= len(examples) <= limits.max_examples:
            raise OutOfRange(f"{len(examples)} examples in a batch", field="batch", expected=f"1 to {limits.max_examples}")
        self.check(examples)
        labels = sum(count_target_tokens(adapter, example) for example in examples)
        if items is None:
            if not labels:
                raise OutOfRange("there is nothing to learn in this batch", field="batch", expected="a label that is not -100")
            items = labels
        if isinstance(items, bool) or not isinstance(items, int | float) or not 0 < items < 1e12:
            raise OutOfRange(f"items is {quote(items)}", field="items", expected="an int or float above 0, below 1e12")
        costs = tuple(min(max(adapter.cost_of(len(example.ids)), _MIN_COST_ROWS), limits.max_rows) for example in examples)
        call = ForwardBackward(examples, costs, items, labels, learns=learns)
        if call.tokens > limits.max_tokens:
            raise OutOfRange(f"{call.tokens} tokens in a batch", field="batch", expected=f"at most {limits.max_tokens}")
        return call

    def check(self, examples: Sequence[Example] | Dataset) -> None:
        """Raises `OutOfRange` if this session cannot train on one of them."""
        longest = min(self._limits.max_rows, self._limits.max_positions) - self.adapter.cost_of(0)
        if isinstance(examples, Dataset):
            examples.check(vocabulary=self._limits.vocabulary, longest=longest)
        else:
            check_examples(examples, vocabulary=self._limits.vocabulary, longest=longest)

    def batches(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Checked examples, in their order, in batches within this session's limits."""
        batch: list[Example] = []
        tokens = 0
        for example in examples:
            tokens += len(example.ids)
            if batch and (len(batch) == self._limits.max_examples or tokens > self._limits.max_tokens):
                yield batch
                batch, tokens = [], len(example.ids)
            batch.append(example)
        if batch:
            yield batch

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Calls within the context run after its end, or after `begin`.

        So the batches that share a pass do not depend on the speed of the caller.
        """
        self._set_held(True)
        try:
            yield
        finally:
            self._set_held(False)

    def begin(self) -> None:
        """Run what is pending, also within `gathering`."""
        self._set_held(False)

    def _set_held(self, is_held: bool) -> None:
        with self._changed:
            self._is_held = is_held
            self._changed.notify_all()

    def optim_step(self, settings: StepSettings, *, number: int | None = None) -> Future[StepResult]:
        """Update the adapter by the accumulated gradients, and clear them."""
        if not isinstance(settings, StepSettings):
            expected = "StepSettings, such as StepSettings(learning_rate=1e-4)"
            raise OutOfRange(f"settings is {quote(settings)}", field="settings", expected=expected)
        return self._submit(self, OptimStep(settings), number)

    def sample(
        self, prompts: Sequence[str | Sequence[int]], *, n: int = 1, number: int | None = None, **settings: Any
    ) -> Future[list[SampledCompletion]]:
        """Completions of prompts (token ids, or text if there is a tokenizer) by the adapter after the calls before this.

        `n` for each prompt, those of the first prompt first. `settings` are `Sampling`'s (`max_tokens`, `temperature`,
        `seed`, `logprobs`, …); the default is 32 tokens, greedy. Later calls do not wait for the completions. One failed
        completion fails the call. Raises `OutOfRange`, `ContextTooLong`, `TooManyRequests`, or `CannotServe` without an
        engine.
        """
        if self._sampler is None:
            raise CannotServe("this session has no engine to sample with: open it with symbiosis.Studio")
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            expected = "a list of prompts, each a text or a list of token ids"
            raise OutOfRange(f"prompts is {quote(prompts)}", field="prompts", expected=expected)
        limits = self._limits
        if type(n) is not int or n < 1 or not 1 <= len(prompts) * n <= limits.max_examples:
            expected = f"1 to {limits.max_examples} completions"
            raise OutOfRange(f"{len(prompts)} prompts, {n!r} completions of each", field="prompts", expected=expected)
        request = self._sampler.check_request(self.tenant, prompts, n, self.adapter.cost_of(0), settings)
        if request.tokens > limits.max_tokens:
            what = f"prompts and completions may have {request.tokens} tokens"
            raise OutOfRange(what, field="max_tokens", expected=f"at most {limits.max_tokens}")
        return self._submit(self, SampleCall(request), number)

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: bool = False,
        replace: bool = False,
        keep: Callable[[AdapterSnapshot], None] | None = None,
        number: int | None = None,
    ) -> Future[None]:
        """Write the adapter as PEFT's `save_pretrained` does; with `optimizer`, `load` resumes from it exactly.

        The path is the provider's own, never a tenant's name. The folder must be new or empty, unless `replace`. `keep` is
        called on another thread with what was written, once it is on disk.
        """
        for name, value in (("optimizer", optimizer), ("replace", replace)):
            if not isinstance(value, bool):
                raise OutOfRange(f"{name} is {quote(value)}", field=name, expected="True or False")
        if keep is not None and not callable(keep):
            raise OutOfRange(f"keep is {quote(keep)}", field="keep", expected="a function, or None")
        return self._submit(self, SaveCheckpoint(_absolute(folder), optimizer=optimizer, replace=replace, keep=keep), number)

    def load(self, folder: str | Path, *, number: int | None = None) -> Future[None]:
        """Read the adapter from a folder, and the optimizer's state if it is there. Gradients are cleared."""
        return self._submit(self, LoadCheckpoint(_absolute(folder)), number)

    def stop(self) -> None:
        """Finish the current optimizer step and start no other.

        Calls behind it, and later batches, fail with `Withdrawn`; all other calls run. For callers without numbers.
        """
        with self._changed:  # a caller that submits more sees the futures of its step resolved
            self.queue.stop()

    def wait_for_files(self) -> None:
        """After `close`: wait until a running save or load is over."""
        if self.file_task is not None:
            futures.wait([self.file_task])

    def close(self) -> None:
        """Release everything. Pending calls fail with `Closed`."""
        self._close(self)

    # For the trainer, which holds the lock

    @property
    def is_ready(self) -> bool:
        """Whether the head of the queue may run now."""
        return bool(self.queue.pending) and self.queue.pending[0] is not self.background_call and not self._is_held

    def pending_costs(self, max_rows: int) -> list[int]:
        """Costs of the pending examples, in their order, until `max_rows` are reached."""
        found: list[int] = []
        for call in self._pending_batches():
            for cost in itertools.islice(call.costs, len(call.losses), None):
                if max_rows <= 0:
                    return found
                found.append(cost)
                max_rows -= cost
        return found

    def pending_examples(self, count: int) -> list[tuple[ForwardBackward, PackedExample]]:
        """The first pending examples, each with its call."""
        found: list[tuple[ForwardBackward, PackedExample]] = []
        for batch, call in enumerate(self._pending_batches(), self.progress.batches):
            for index in range(len(call.losses), len(call.examples)):
                if len(found) == count:
                    return found
                dropout_key = f"{self.seed}/{batch}/{index}" if call.learns else ""
                found.append((call, PackedExample(call.examples[index], call.items, dropout_key)))
        return found

    def _pending_batches(self) -> Iterator[ForwardBackward]:
        """The calls at the head of the queue that may share a pass: of one kind, up to the next other call."""
        learns: bool | None = None
        for call in self.queue.pending:
            if not isinstance(call, ForwardBackward) or (learns is not None and call.learns != learns):
                return
            learns = call.learns
            yield call

    def release(self) -> None:
        """Drop all tensors of a closed session that no pass uses any more."""
        self.adapter, self.optimizer, self.parameter_count = NO_ADAPTER, Optimizer({}), 0
        self.queue.clear_known()


def _absolute(folder: str | Path) -> Path:
    """The path at the time of the call: the process may change its directory before the call runs."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path or not Path(path).absolute().name:
        raise OutOfRange(f"folder is {quote(folder)}", field="folder", expected="the path of a folder")
    return Path(path).absolute()
