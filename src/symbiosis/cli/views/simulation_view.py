"""Tables and plots of simulations: what `symbiosis simulate` prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.cluster.simulation.report import SimulationReport

_COLORS = ("#1a73e8", "#e8710a", "#34a853", "#c58af9", "#9aa0a6", "#d93025")


def print_reports(reports: Sequence[SimulationReport], console: Console, profile: str) -> None:
    """One column for each policy. `profile` names the simulated engine."""
    first = reports[0]
    title = f"{first.trace}: {first.requests:,} requests in {format_duration(first.hours)}, engines: {profile}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report.policy, justify="right")
    rows: dict[str, Callable[[SimulationReport], str]] = {
        "GPU-hours": lambda each: f"{each.gpu_hours:,.{2 if each.gpu_hours >= 1 else 4}f}",
        "within the objective": lambda each: f"{each.within:.2%}",
        "TTFT counted from an idle engine's": lambda each: f"{each.within_of_idle:.2%}",
        "TTFT p50": lambda each: f"{each.ttft_p50_s:.3f} s",
        "TTFT p99": lambda each: f"{each.ttft_p99_s:.3f} s",
        "TPOT p50": lambda each: f"{each.tpot_p50_s * 1e3:.1f} ms",
        "TPOT p99": lambda each: f"{each.tpot_p99_s * 1e3:.1f} ms",
        "most engines": lambda each: f"{each.most_engines:,}",
        "engines started": lambda each: f"{each.engines_started:,}",
        "adapters loaded": lambda each: f"{each.adapter_loads:,}",
        "prompt tokens cached": lambda each: f"{each.cached_share:.1%}",
        "migrations": lambda each: f"{each.migrations:,}",
        "preemptions": lambda each: f"{each.preemptions:,}",
        "rejected": lambda each: f"{each.rejected:,}",
        "simulated in": lambda each: f"{each.seconds:.1f} s",
    }
    for name, shown in rows.items():
        table.add_row(name, *(shown(report) for report in reports))
    console.print(table)
    console.print("TTFT: time to the first token of a request. TPOT: mean time of each later token.")
    if first.attainable < 1:
        console.print(f"An idle engine has the first token of {first.attainable:.2%} of the requests in time.")


def format_duration(hours: float) -> str:
    """In the unit that gives a readable number."""
    if hours >= 2:
        return f"{hours:.2f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 2 else f"{hours * 3600:.0f} s"


def plot_reports(reports: Sequence[SimulationReport], file: Path) -> None:
    """Engines and requests of all policies over time, and the batch of each engine as in Punica's figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 + 2.2 * len(reports)), layout="constrained")
    axes = figure.subplots(2 + len(reports), 1, sharex=True)
    hours = [second / 3600 for second in reports[0].timeline.seconds]
    axes[0].plot(hours, reports[0].timeline.requests, color="#9aa0a6", label="requests on engines")
    axes[0].set_ylabel("requests")
    for report, color in zip(reports, _COLORS * len(reports), strict=False):
        at = [second / 3600 for second in report.timeline.seconds]
        axes[1].plot(at, report.timeline.engines, color=color, label=f"{report.policy}: {report.gpu_hours:.1f} GPU-hours")
    axes[1].set_ylabel("engines")
    for each in axes[:2]:
        each.legend(loc="upper left", fontsize=8)
        each.grid(alpha=0.3)
    for each, report in zip(axes[2:], reports, strict=True):
        _draw_batches(each, report, figure)
    axes[-1].set_xlabel("hours")
    figure.savefig(file, dpi=120)


def _draw_batches(axes: Any, report: SimulationReport, figure: Any) -> None:
    import numpy as np

    batches = np.asarray(report.timeline.batches, dtype=float).T
    used = np.flatnonzero((batches >= 0).any(axis=1))
    batches = batches[: used[-1] + 1 if len(used) else 1]
    masked = np.where(batches < 0, np.nan, batches)
    last = report.timeline.seconds[-1] / 3600
    image = axes.imshow(
        masked, aspect="auto", origin="lower", interpolation="nearest", extent=(0, last, -0.5, len(batches) - 0.5)
    )
    axes.set_ylabel("engine")
    axes.set_title(f"batch of each engine, {report.policy}", fontsize=9)
    figure.colorbar(image, ax=axes, label="requests", pad=0.01)
