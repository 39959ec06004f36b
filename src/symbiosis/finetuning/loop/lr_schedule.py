"""Learning rate schedules: those of transformers with the same names."""

from __future__ import annotations

import math
from enum import StrEnum


class LrSchedule(StrEnum):
    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


def lr_factor(schedule: LrSchedule, step: int, *, warmup: int, total: int) -> float:
    """The multiplier of the learning rate at a step, from 0 on."""
    if schedule is LrSchedule.CONSTANT:
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if schedule is LrSchedule.CONSTANT_WITH_WARMUP:
        return 1.0
    if schedule is LrSchedule.LINEAR:
        return max(0.0, (total - step) / max(1, total - warmup))
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
