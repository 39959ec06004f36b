"""How a job trains: the settings, and from them every step with its examples and learning rate.

Names, defaults and meaning are those of transformers' `TrainingArguments`; order and schedule are worked out from the
seed alone, so a job can go on at any step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from symbiosis.errors import OutOfRange
from symbiosis.finetuning.loop.lr_schedule import LrSchedule, factor
from symbiosis.finetuning.optimizer import StepSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All settings are checked."""

    seed: int = 42
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """If above 0, so many steps and as many epochs as they take."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: LrSchedule | str = LrSchedule.LINEAR
    warmup_steps: float = 0
    """Steps; below 1, the share of all steps."""
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
        for name in ("num_train_epochs", "warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected="0 to 1000000")
        if self.lr_scheduler_type not in tuple(LrSchedule):
            raise OutOfRange(
                f"lr_scheduler_type is {self.lr_scheduler_type!r}", field="lr_scheduler_type", expected=", ".join(LrSchedule)
            )
        rate: object = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise OutOfRange(f"learning_rate is {rate!r}", field="learning_rate", expected="a number")
        self.settings(0, 1)

    def total(self, examples: int) -> int:
        """Steps in all, for so many examples."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * math.ceil(self._batches(examples) / self.gradient_accumulation_steps))

    def settings(self, step: int, total: int) -> StepSettings:
        """Those of a step, from 0 on."""
        warmup = int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(total * self.warmup_steps)
        return StepSettings(
            learning_rate=self.learning_rate * factor(LrSchedule(self.lr_scheduler_type), step, warmup=warmup, total=total),
            max_grad_norm=self.max_grad_norm,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_epsilon=self.adam_epsilon,
        )

    def batches(self, examples: int, *, after: int = 0) -> Iterator[list[list[int]]]:
        """For each step after the first so many: the examples of its batches, by number."""
        yield from islice(self._steps(examples), after, self.total(examples))

    def _batches(self, examples: int) -> int:
        return math.ceil(examples / self.per_device_train_batch_size)

    def _steps(self, examples: int) -> Iterator[list[list[int]]]:
        size, together = self.per_device_train_batch_size, self.gradient_accumulation_steps
        epoch = 0
        while True:
            # as accelerate's SeedableRandomSampler: every epoch from a seed of its own
            order = torch.randperm(examples, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            batches = [order[at : at + size] for at in range(0, examples, size)]
            yield from (batches[at : at + together] for at in range(0, len(batches), together))
            epoch += 1
