"""Whether a fine-tuning run was long enough, and its loss did not rise."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MIN_RISE = 1.1
_MIN_STEPS = 10
"""An adapter begins without effect; fewer steps hardly change it at the default learning rates."""


def training_warning(losses: Sequence[float]) -> str | None:
    """A warning if a run of these losses, one for each step, made the model worse or was very short; None otherwise."""
    if (warning := _rise_warning(losses)) is not None:
        return warning
    if 0 < len(losses) < _MIN_STEPS:
        steps = "1 optimizer step" if len(losses) == 1 else f"{len(losses)} optimizer steps"
        return (
            f"with {steps} the adapter hardly changes the replies: train on more examples (about 50 show an effect), or longer "
            "with --steps or --epochs"
        )
    return None


def _rise_warning(losses: Sequence[float]) -> str | None:
    """Compares the first step, whose loss is that of the model before training, with the mean of the last quarter, since
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
