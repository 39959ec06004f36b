"""The recipe of a job: its settings, and from them the batches and the learning rate of every step.

Names, defaults and meaning are those of transformers' `TrainingArguments`. Order and schedule depend on the seed alone, so
a job can resume at any step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice

import torch

from symbiosis.errors import OutOfRange
from symbiosis.finetuning.loop.lr_schedule import LrSchedule, lr_factor
from symbiosis.finetuning.optimizer import StepSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Raises `OutOfRange` for an invalid setting."""

    seed: int = 42
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """If above 0, this replaces `num_train_epochs`."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: LrSchedule | str = LrSchedule.LINEAR
    warmup_steps: float = 0
    """Steps; below 1, a fraction of all steps."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        whole = {"seed": 0, "max_steps": -1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        for name, low in whole.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value < 1 << 31:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected=f"a whole number from {low} on")
        for name, high in (("num_train_epochs", 1e6), ("warmup_steps", 1e6), ("learning_rate", 1e30)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected=f"a number from 0 to {high:g}")
        if self.lr_scheduler_type not in tuple(LrSchedule):
            kind, expected = self.lr_scheduler_type, ", ".join(LrSchedule)
            raise OutOfRange(f"lr_scheduler_type is {kind!r}", field="lr_scheduler_type", expected=expected)
        self.step_settings(0, 1)  # raises if another setting is invalid

    def total_steps(self, examples: int) -> int:
        if self.max_steps > 0:
            return self.max_steps
        batches = math.ceil(examples / self.per_device_train_batch_size)
        return math.ceil(self.num_train_epochs * math.ceil(batches / self.gradient_accumulation_steps))

    def step_settings(self, step: int, total: int) -> StepSettings:
        """Of a step, from 0 on."""
        settings = {each.name: getattr(self, each.name) for each in fields(StepSettings)}
        warmup = int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(total * self.warmup_steps)
        settings["learning_rate"] *= lr_factor(LrSchedule(self.lr_scheduler_type), step, warmup=warmup, total=total)
        return StepSettings(**settings)

    def steps(self, examples: int, *, after: int = 0) -> Iterator[list[list[int]]]:
        """The batches of each step after the first `after`, as numbers of examples."""
        yield from islice(self._endless_steps(examples), after, self.total_steps(examples))

    def _endless_steps(self, examples: int) -> Iterator[list[list[int]]]:
        size, accumulated = self.per_device_train_batch_size, self.gradient_accumulation_steps
        epoch = 0
        while True:
            # as accelerate's SeedableRandomSampler: each epoch has its own seed
            order = torch.randperm(examples, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            batches = [order[at : at + size] for at in range(0, examples, size)]
            yield from (batches[at : at + accumulated] for at in range(0, len(batches), accumulated))
            epoch += 1
