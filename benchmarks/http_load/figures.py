"""From reports to figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.http_load.client import Report
from benchmarks.results import compared

TIMES = ("first_p50_s", "first_p99_s", "gap_p50_s", "gap_p99_s", "answer_p50_s", "answer_p99_s")
"""To the first token, between tokens, to the whole answer."""


def summarise(report: Report) -> dict[str, Any]:
    """Figures of one run."""
    complete = [answer for answer in report.answers if not answer.error and not answer.is_cut]
    errors = [answer.error for answer in report.answers if answer.error]
    found: dict[str, Any] = {"requests": len(report.answers), "errors": len(errors), "first_errors": errors[:3]}
    if complete:
        seconds = max(answer.done for answer in complete) - min(answer.due for answer in complete)
        found["seconds"] = seconds
        found["tokens_per_s"] = sum(answer.tokens for answer in complete) / seconds
        found |= quantiles("answer", [answer.done - answer.due for answer in complete])
    found |= quantiles("first", report.first_s) | quantiles("gap", report.gaps_s)
    if report.frames:
        found["frames"] = report.frames
        found["frames_per_client_cpu_s"] = report.frames / max(1e-9, sum(report.cpu_s))
    if report.kept:
        found |= {"checked_whole": report.kept, "differing_texts": report.differing}
    return found


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p99 = np.quantile(np.asarray(values), [0.5, 0.99])
    return {f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99)}


def cpu_shares(report: Report, server: Mapping[str, Sequence[float]] | None, seconds: float) -> dict[str, list[float]]:
    """Cores that each process kept busy: of the load client, or of the engine alone."""
    if server is None:
        return {"engine alone": [round(each / seconds, 3) for each in report.cpu_s]}
    used = {"clients": report.cpu_s, **server}
    return {name: [round(each / seconds, 3) for each in values] for name, values in used.items()}


def compare_cases(runs: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str) -> dict[str, Any]:
    """Of each figure its cases with ratios to the baseline within one repetition."""
    found = {}
    for name in ("tokens_per_s", *TIMES):
        cases = {case: [run[name] for run in each] for case, each in runs.items() if all(name in run for run in each)}
        if baseline in cases:
            found[name] = compared(cases, baseline)
    return found


def growth(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Tokens/s with so many streams at a time, of that with the next smaller number; medians over the repetitions."""
    counts = sorted(runs)
    return {
        f"{more}/{less}": statistics.median(
            large["tokens_per_s"] / small["tokens_per_s"] for small, large in zip(runs[less], runs[more], strict=True)
        )
        for less, more in pairwise(counts)
    }
