"""Whether the loss rose over a fine-tuning run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MIN_RISE = 1.1


def loss_warning(losses: Sequence[float]) -> str | None:
    """A warning if training made the model worse; None otherwise.

    Compares the first step, whose loss is that of the model before training, with the mean of the last quarter, since
    single batches are noisy.
    """
    if len(losses) < 2:
        return None
    last_losses = losses[-max(1, len(losses) // 4) :]
    first, last = losses[0], sum(last_losses) / len(last_losses)
    if math.isfinite(last) and last <= _MIN_RISE * first:
        return None
    return (
        f"the loss rose from {first:.2f} to {last:.2f}: this adapter is worse than the base model on its own data. "
        "Use a lower --lr, or leave it out for the default of the method"
    )
