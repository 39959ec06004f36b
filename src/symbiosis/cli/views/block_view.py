"""Tables and plots of simulated zoos: what `symbiosis zoo simulate` prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.cluster.simulation.blocks.block_report import BlockReport

_COLORS = ("#1a73e8", "#e8710a", "#34a853", "#c58af9", "#9aa0a6", "#d93025")
_MOST_CHAINS = 8


def print_block_reports(reports: Sequence[BlockReport], console: Console, profile: str) -> None:
    """One column for each system. `profile` names the costs."""
    first = reports[0]
    title = f"{first.trace} of {first.applications} applications, blocks: {profile}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report.system, justify="right")
    rows: dict[str, Callable[[BlockReport], str]] = {
        "latency p50": lambda each: f"{each.latency_p50_s:.2f} s",
        "latency p95": lambda each: f"{each.latency_p95_s:.2f} s",
        "TTFT p95": lambda each: f"{each.ttft_p95_s:.2f} s",
        "tokens/s": lambda each: f"{each.throughput:,.0f}",
        "devices busy": lambda each: f"{each.utilization:.0%}",
        "requests in a batch": lambda each: f"{each.mean_batch:.1f}",
        "weights": lambda each: f"{each.weight_gb:,.0f} GB",
        "between servers": lambda each: f"{each.between_servers_gb:,.2f} GB",
        "hops between servers": lambda each: f"{each.hops_between_servers:,}",
        "latency on links": lambda each: f"{each.transfer_share:.2%}",
        "KV caches moved": lambda each: f"{each.moves:,}",
        "preemptions": lambda each: f"{each.preemptions:,}",
        "instances added": lambda each: f"{each.loads:,}",
        "rejected": lambda each: f"{each.rejected:,}",
        "by an equivalent chain": lambda each: f"{each.adaptive:,}",
        "loss added, mean": lambda each: f"{each.mean_loss:.3f}",
        "loss added, most": lambda each: f"{each.most_loss:.3f}",
        "simulated in": lambda each: f"{each.seconds:.1f} s",
    }
    for name, shown in rows.items():
        table.add_row(name, *(shown(report) for report in reports))
    console.print(table)
    adaptive = [report for report in reports if report.adaptive]
    for report in adaptive:
        chains = Table(title=f"chains that served, {report.system}", box=box.SIMPLE, title_justify="left", pad_edge=False)
        chains.add_column("chain")
        chains.add_column("requests", justify="right")
        for chain, count in list(report.chains.items())[:_MOST_CHAINS]:
            chains.add_row(chain, f"{count:,}")
        console.print(chains)
    console.print("TTFT: time to the first token of a request. Loss: nats per token above the application's own chain.")


def plot_block_reports(reports: Sequence[BlockReport], file: Path) -> None:
    """Requests under way over time, and the queue of each device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3 + 2.2 * len(reports)), layout="constrained")
    axes = figure.subplots(1 + len(reports), 1)
    for report, color in zip(reports, _COLORS * len(reports), strict=False):
        label = f"{report.system}: p95 {report.latency_p95_s:.1f} s, {report.throughput:,.0f} tokens/s"
        axes[0].plot(report.timeline.seconds, report.timeline.unfinished, color=color, label=label)
    axes[0].set_ylabel("requests under way")
    axes[0].legend(loc="upper right", fontsize=8)
    axes[0].grid(alpha=0.3)
    most = max((max(queues) for report in reports for queues in report.timeline.queues_s), default=1.0) or 1.0
    for each, report in zip(axes[1:], reports, strict=True):
        columns = [[1e3 * queue for queue in queues] for queues in zip(*report.timeline.queues_s, strict=True)]
        last = report.timeline.seconds[-1] + 1
        image = each.imshow(
            columns, aspect="auto", origin="lower", interpolation="nearest", extent=(0, last, -0.5, len(columns) - 0.5),
            vmin=0, vmax=1e3 * most,
        )  # fmt: skip
        each.set_ylabel("device")
        each.set_title(f"milliseconds of work that wait, {report.system}", fontsize=9)
        figure.colorbar(image, ax=each, pad=0.01)
    axes[-1].set_xlabel("seconds")
    figure.savefig(file, dpi=120)
