"""A hosted training session: an adapter, its optimizer, and calls that are computed in their order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from symbiosis.adapters.files import quote
from symbiosis.errors import CannotServe, OutOfRange
from symbiosis.finetuning.call_queue import CallQueue
from symbiosis.finetuning.calls import (
    Call,
    ForwardBackward,
    LoadCheckpoint,
    LossResult,
    OptimStep,
    SampleCall,
    SaveCheckpoint,
    StepResult,
)
from symbiosis.finetuning.checkpoint import Progress
from symbiosis.finetuning.dataset import Dataset
from symbiosis.finetuning.examples import Example, check, digest
from symbiosis.finetuning.optimizer import Optimizer, StepSettings, optimizer_of
from symbiosis.finetuning.packed.batch import PackedExample, count_target_tokens
from symbiosis.finetuning.sampler_protocol import SampledAnswer, SamplerProtocol
from symbiosis.finetuning.trained_adapter import NO_ADAPTER, AdapterSnapshot, TrainedAdapter

Submit: TypeAlias = Callable[["TrainingSession", Call, int | None], Future[Any]]

_LEAST = 16
"""What a sequence costs, in rows, however short it is: attention, dropout and loss take each by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """What a batch may have."""

    vocabulary: int
    rows: int
    """Most rows of one example in a pass, virtual tokens included."""
    positions: int
    """Most tokens of one sequence that the model takes, virtual ones included."""
    examples: int
    tokens: int
    """Most of one batch."""


class TrainingSession:
    """Any thread may call. Every call returns at once, with an answer to come.

    A call may be given a number, 1 for the first; asked again with the same number it is not computed again. A call
    that is wrong in itself raises `OutOfRange` here. A session whose numbers are no numbers any more has failed:
    what waits, and every later call, ends in `Diverged`.
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
        bounds: SessionLimits,
        line: CallQueue,
        sampler: SamplerProtocol | None,
        submit: Submit,
        hold: Callable[[TrainingSession, bool], None],
        stop: Callable[[TrainingSession], None],
        close: Callable[[TrainingSession], None],
    ) -> None:
        self.id, self.tenant, self.weight, self.seed = id, tenant, weight, seed
        self.adapter, self.optimizer = adapter, optimizer_of(adapter.parameters, adapter.flat)
        self.size = adapter.size
        self.takes_items = takes_items
        """Whether Trainer would divide the losses of all batches before a step by the labels of all."""
        self.progress = Progress()
        self.line = line
        self.filing: Future[None] | None = None
        """The file that was read or written last, or is now."""
        self.busy = False
        """Whether a file of it is read or written: no pass touches it meanwhile."""
        self.held = False
        """Whether more is to come that belongs to what waits."""
        self._bounds, self._sampler = bounds, sampler
        self._submit, self._hold, self._stop, self._close = submit, hold, stop, close

    def forward_backward(
        self, batch: Sequence[Example], *, items: float | None = None, number: int | None = None
    ) -> Future[LossResult]:
        """Add a batch's gradient to what has gathered since the last step.

        The loss is the mean over the batch's labels, as `model(**batch).loss`. With `items`, it is their sum over
        that: of several batches before one step, Trainer gives each the labels of all (`num_items_in_batch`).
        """
        return self._submit(self, self._batch(batch, items, learns=True), number)

    def forward(self, batch: Sequence[Example], *, items: float | None = None, number: int | None = None) -> Future[LossResult]:
        """A batch's loss as the adapter is now, without dropout; nothing is learned from it."""
        return self._submit(self, self._batch(batch, items, learns=False), number)

    def _batch(self, batch: Sequence[Example], items: float | None, *, learns: bool) -> ForwardBackward:
        if not isinstance(batch, Iterable):
            raise OutOfRange(f"batch is {quote(batch)}", field="batch", expected="a list of Example(ids, labels)")
        examples, adapter = tuple(batch), self.adapter
        if not 1 <= len(examples) <= self._bounds.examples:
            raise OutOfRange(f"{len(examples)} examples in a batch", field="batch", expected=f"1 to {self._bounds.examples}")
        self.check(examples)
        size = sum(len(example.ids) for example in examples)
        if size > self._bounds.tokens:
            raise OutOfRange(f"{size} tokens in a batch", field="batch", expected=f"at most {self._bounds.tokens}")
        tokens = sum(count_target_tokens(adapter, example) for example in examples)
        if items is None:
            if not tokens:
                raise OutOfRange("there is nothing to learn in this batch", field="batch", expected="a label that is not -100")
            items = tokens
        if isinstance(items, bool) or not isinstance(items, int | float) or not 0 < items < 1e12:
            raise OutOfRange(f"items is {quote(items)}", field="items", expected="an int or float above 0, below 1e12")
        costs = tuple(min(max(adapter.cost_of(len(example.ids)), _LEAST), self._bounds.rows) for example in examples)
        return ForwardBackward(examples, costs, items, tokens, digest(examples, items), learns)

    def check(self, examples: Sequence[Example] | Dataset) -> None:
        """Raises `OutOfRange` if one of them could not be trained on."""
        longest = min(self._bounds.rows, self._bounds.positions) - self.adapter.cost_of(0)
        if isinstance(examples, Dataset):
            examples.check(vocabulary=self._bounds.vocabulary, longest=longest)
        else:
            check(examples, vocabulary=self._bounds.vocabulary, longest=longest)

    def batches(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Examples that were checked, in their order, in batches that may be asked for."""
        batch: list[Example] = []
        tokens = 0
        for example in examples:
            tokens += len(example.ids)
            if batch and (len(batch) == self._bounds.examples or tokens > self._bounds.tokens):
                yield batch
                batch, tokens = [], len(example.ids)
            batch.append(example)
        if batch:
            yield batch

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """What is asked for within is begun when all of it is here, or `begin` says so.

        So which batches meet in a pass does not depend on how fast the caller is.
        """
        self._hold(self, True)
        try:
            yield
        finally:
            self._hold(self, False)

    def begin(self) -> None:
        """No more comes before some of what waits is done."""
        self._hold(self, False)

    def optim_step(self, settings: StepSettings, *, number: int | None = None) -> Future[StepResult]:
        """Change the adapter by the gradients that have gathered, and forget them."""
        if not isinstance(settings, StepSettings):
            expected = "StepSettings, such as StepSettings(learning_rate=1e-4)"
            raise OutOfRange(f"settings is {quote(settings)}", field="settings", expected=expected)
        return self._submit(self, OptimStep(settings), number)

    def sample(
        self, prompts: Sequence[str | Sequence[int]], *, n: int = 1, number: int | None = None, **settings: Any
    ) -> Future[list[SampledAnswer]]:
        """Answers to prompts (token ids, or text if there is a tokenizer) by the adapter as it is at this place of the order.

        `n` for each prompt, those of the first before those of the second. `settings` are `Sampling`'s (`max_tokens`,
        `temperature`, `seed`, `logprobs`, …); by default 32 tokens, always the likeliest. Calls after this one do not
        wait for the answers. If one answer fails, the call does. Raises `OutOfRange`, `ContextTooLong`, `TooManyRequests`, or
        `CannotServe` where there is no engine to sample with.
        """
        if self._sampler is None:
            raise CannotServe("this session has no engine to sample with: open it with symbiosis.Studio")
        most = self._bounds.examples
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            expected = "a list of prompts, each a text or a list of token ids"
            raise OutOfRange(f"prompts is {quote(prompts)}", field="prompts", expected=expected)
        if type(n) is not int or n < 1 or not 1 <= len(prompts) * n <= most:
            raise OutOfRange(f"{len(prompts)} prompts, {n!r} answers to each", field="prompts", expected=f"1 to {most} answers")
        asked = self._sampler.ask(self.tenant, prompts, n, self.adapter.cost_of(0), settings)
        if asked.tokens > self._bounds.tokens:
            raise OutOfRange(
                f"prompts and answers may have {asked.tokens} tokens",
                field="max_tokens",
                expected=f"at most {self._bounds.tokens}",
            )
        return self._submit(self, SampleCall(asked), number)

    def save(
        self,
        folder: str | Path,
        *,
        optimizer: bool = False,
        replace: bool = False,
        keep: Callable[[AdapterSnapshot], None] | None = None,
        number: int | None = None,
    ) -> Future[None]:
        """Write the adapter as PEFT's `save_pretrained` does; with `optimizer`, `load` can go on from there exactly.

        The folder is the host's own and must not exist, unless it is to be replaced: a name from a tenant must never become
        one. `keep` is called, by another thread, with what was written once it is on disk.
        """
        for name, value in (("optimizer", optimizer), ("replace", replace)):
            if not isinstance(value, bool):
                raise OutOfRange(f"{name} is {quote(value)}", field=name, expected="True or False")
        if keep is not None and not callable(keep):
            raise OutOfRange(f"keep is {quote(keep)}", field="keep", expected="a function, or None")
        return self._submit(self, SaveCheckpoint(_path(folder), optimizer, replace, keep), number)

    def load(self, folder: str | Path, *, number: int | None = None) -> Future[None]:
        """Take the adapter's numbers from a folder, and the optimizer's if they are there. Gradients are forgotten."""
        return self._submit(self, LoadCheckpoint(_path(folder)), number)

    def stop(self) -> None:
        """Learn no further than to the end of the step under way.

        What was asked for behind it, and batches that are still to come, end in `Withdrawn`; everything else is done as
        before. For callers that give no numbers.
        """
        self._stop(self)

    def wait_for_files(self) -> None:
        """After `close`: what ended in `Closed` may still be written. Then it is no more."""
        if self.filing is not None:
            futures.wait([self.filing])

    def close(self) -> None:
        """Give everything back. What waits ends in `Closed`."""
        self._close(self)

    # For the host, which has the lock

    @property
    def ready(self) -> bool:
        """Whether something waits that may be done now."""
        return bool(self.line.waiting) and not self.busy and not self.held

    def costs(self, room: int) -> list[int]:
        """Of the examples that wait, in their order, as many as may fit."""
        found: list[int] = []
        for call in self._batches():
            for cost in itertools.islice(call.costs, len(call.losses), None):
                if room <= 0:
                    return found
                found.append(cost)
                room -= cost
        return found

    def pieces(self, count: int) -> list[tuple[ForwardBackward, PackedExample]]:
        """The first examples that wait."""
        found: list[tuple[ForwardBackward, PackedExample]] = []
        for at, call in enumerate(self._batches()):
            batch = self.progress.batches + at
            for index in range(len(call.losses), len(call.examples)):
                if len(found) == count:
                    return found
                key = f"{self.seed}/{batch}/{index}" if call.learns else ""
                found.append((call, PackedExample(call.examples[index], call.items, key)))
        return found

    def _batches(self) -> list[ForwardBackward]:
        """The calls at the head of its line that may be computed together: up to the next that is something else."""
        found: list[ForwardBackward] = []
        for call in self.line.waiting:
            if not isinstance(call, ForwardBackward) or (found and call.learns != found[0].learns):
                break
            found.append(call)
        return found

    def release(self) -> None:
        """Once nothing of it is computed any more: whoever keeps a closed session keeps no tensor by it."""
        self.adapter, self.optimizer, self.size = NO_ADAPTER, Optimizer({}), 0
        self.line.forget()


def _path(folder: str | Path) -> Path:
    """The same place even if the process changes its folder before the call's turn comes."""
    place = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(place, str) or not place or "\0" in place or not Path(place).absolute().name:
        raise OutOfRange(f"folder is {quote(folder)}", field="folder", expected="the path of a folder")
    return Path(place).absolute()
