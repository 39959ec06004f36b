"""Fit a `StepCost` to measured steps: least squares without negative terms, each step weighted by its own time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of an engine, or the mean of equal ones."""

    rows: int
    """Decode rows."""
    context: int
    """Tokens in their KV cache, all together."""
    prefill: int
    """Prompt tokens."""
    attended: float
    """Sum over the prompt tokens of the tokens before each."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FittedTerms:
    """Terms of a `StepCost`, and how far they are from the measurements."""

    fixed_s: float
    row_s: float
    context_s: float
    prefill_s: float
    attention_s: float
    median_error: float
    """Median of the relative errors of the steps."""


def fit_steps(steps: Sequence[MeasuredStep]) -> FittedTerms:
    """The terms that explain the steps best. Terms that would be negative are zero."""
    columns = np.array([[1.0, step.rows, step.context, step.prefill, step.attended] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    weighted = columns / seconds[:, None]  # relative errors: a short step counts as much as a long one
    terms, active = np.zeros(columns.shape[1]), list(range(columns.shape[1]))
    while active:
        scale = np.abs(weighted[:, active]).max(axis=0)
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(weighted[:, active] / scale, np.ones(len(steps)), rcond=None)[0] / scale
        if (found >= 0).all():
            terms[active] = found
            break
        active = [index for index, value in zip(active, found, strict=True) if value > 0]
    error = float(np.median(np.abs(columns @ terms / seconds - 1)))
    fixed, row, context, prefill, attention = map(float, terms)
    return FittedTerms(fixed, row, context, prefill, attention, error)
