"""Measurements of a demo run, and their display: live table, report, plot, JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from symbiosis.errors import SymbiosisError

Report = dict[str, Any]

# the same style in all three panels; readable without colour
_MARKS = ("o", "s", "^")
_COLOURS = ("#0072b2", "#d55e00", "#009e73")


class DemoFailed(SymbiosisError):
    """A process of the demo ended early."""

    code = "demo_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A tenant that fine-tunes on demo_data/NAME.jsonl."""

    name: str
    method: str
    lr: float
    link: str
    question: str
    """Prompt before and after training; not in the data."""


def memory(process: int | str) -> dict[str, int]:
    """Memory of a process in bytes: peak resident set (rss) and pages of mapped files (file). 0 if it has exited."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        lines = []
    found = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM:", "RssFile:"))}
    return {"rss": found.get("VmHWM:", 0), "file": found.get("RssFile:", 0)}


@dataclass(slots=True)
class Run:
    """Measurements of one demo run."""

    tenants: tuple[Tenant, ...]
    steps: int
    started: float = 0.0
    """When the first optimizer step could begin."""
    seconds: float = 0.0
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    losses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Per tenant: (seconds since the start, loss) of each step."""
    step_rates: dict[str, list[float]] = field(default_factory=dict)
    """Per tenant: tokens/s of each step."""
    rates: dict[str, float] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    rss: dict[str, int] = field(default_factory=dict)
    """Peak resident set of each process."""
    file: dict[str, int] = field(default_factory=dict)
    """Pages of mapped files among these; the operating system holds them once for all processes."""
    polls: list[dict[str, float]] = field(default_factory=list)
    """Per poll of the executor: seconds, mean batch and tokens/s since the previous poll."""
    copy: dict[str, int] = field(default_factory=dict)
    said: Report = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    def take(self, report: Report) -> None:
        who, what = report["who"], report["what"]
        if what == "failed":
            raise DemoFailed(f"{who} failed: {report['reason']}")
        if what == "before":
            self.before[who] = report["text"]
            # all tenants start together, after the last of these reports
            self.started = time.time()
        elif what == "step":
            self.losses.setdefault(who, []).append((report["at"] - self.started, report["loss"]))
            self.step_rates.setdefault(who, []).append(report["tokens_per_s"])
            self.rates[who] = report["tokens_per_s"]
        elif what == "after":
            self.after[who], self.rates[who], self.weights[who] = report["text"], report["tokens_per_s"], report["weights"]
        elif what == "said":
            self.said = report
        elif what == "copy":
            self.copy = {name: report[name] for name in ("runtime", "weights", "rss", "file")}
        elif what == "text":
            self.plain[report["tenant"]] = report["text"]

    def poll(self, stats: dict[str, Any], processes: dict[str, int]) -> None:
        for name, process in processes.items():
            seen = memory(process)
            self.rss[name] = max(self.rss.get(name, 0), seen["rss"])
            self.file[name] = max(self.file.get(name, 0), seen["file"])
        old, self.stats = self.stats, stats
        batches, seconds = stats["batches"] - old.get("batches", 0), stats["uptime_s"] - old.get("uptime_s", 0.0)
        if old and batches and len(self.before) == len(self.tenants):
            mean_batch = (stats["calls"] - old["calls"]) / batches
            rate = (stats["tokens"] - old["tokens"]) / max(seconds, 1e-9)
            self.polls.append({"at": time.time() - self.started, "mean_batch": mean_batch, "tokens_per_s": rate})

    def ends(self, tenant: str) -> tuple[float, float]:
        """Mean loss of the first and the last quarter of the steps, since single batches are noisy."""
        losses = [loss for _, loss in self.losses[tenant]]
        some = max(1, len(losses) // 4)
        return sum(losses[:some]) / some, sum(losses[-some:]) / some

    def totals(self) -> dict[str, int]:
        """Bytes of the executor and the training tenants, and of as many plain processes."""
        names = [tenant.name for tenant in self.tenants]
        return {
            "weights": self.stats["bytes_held"] + sum(self.weights[name] for name in names),
            "rss": sum(self.rss[name] for name in ("executor", *names)),
            "own": sum(self.rss[name] - self.file[name] for name in ("executor", *names)),
            "copies_weights": len(names) * self.copy["weights"],
            "copies_rss": len(names) * self.copy["rss"],
            "copies_own": len(names) * (self.copy["rss"] - self.copy["file"]),
        }

    def checks(self) -> list[tuple[bool, str]]:
        """Each claim of the demo and whether it holds."""
        found = []
        for tenant in self.tenants:
            name, (first, last) = tenant.name, self.ends(tenant.name)
            found.append((last < first, f"{name}: loss fell ({first:.2f} → {last:.2f})"))
            found.append((self.before[name] != self.after[name], f"{name}: the answer changed"))
            same = self.plain.get(name) == self.after[name]
            found.append((same, f"{name}: plain transformers + PEFT gives the same text with the saved adapter"))
        return found


def view(run: Run) -> RenderableType:
    """The live table."""
    table = Table(title="one base model, four tenants", title_justify="left")
    for column in ("tenant", "does", "link", "step", "loss", "tokens/s"):
        table.add_column(column, justify="left" if column in ("tenant", "does", "link") else "right")
    for tenant in run.tenants:
        losses = run.losses.get(tenant.name, [])
        moved = f"{losses[0][1]:.2f} → {losses[-1][1]:.2f}" if losses else "…"
        rate = f"{run.rates[tenant.name]:,.0f}" if tenant.name in run.rates else "…"
        done = " done" if tenant.name in run.after else ""
        table.add_row(tenant.name, f"trains {tenant.method}", tenant.link, f"{len(losses)}/{run.steps}{done}", moved, rate)
    table.add_row("chatter", f"chats, {run.said.get('answers', 0)} answers", "tcp", "", "", "")
    lines: list[RenderableType] = [table]
    if run.stats:
        text = f"executor: {run.stats['calls']:,} calls in {run.stats['batches']:,} batches"
        if run.polls:
            text += f" · now {run.polls[-1]['mean_batch']:.2f} calls a batch, {run.polls[-1]['tokens_per_s']:,.0f} tokens/s"
        lines.append(Text(text))
    if run.said:
        lines.append(Text(f"chatter: {run.said['question']} — {_short(run.said['text'])}", style="dim"))
    return Group(*lines)


def report(run: Run) -> RenderableType:
    """The final report: replies, losses, memory, batches, checks."""
    answers = Table(title="before and after", title_justify="left", show_lines=True)
    for column in ("tenant", "asked", "before", "after", "loss first → last"):
        answers.add_column(column, overflow="fold")
    for tenant in run.tenants:
        losses = run.losses[tenant.name]
        answers.add_row(
            f"{tenant.name}\n({tenant.method}, {tenant.link})",
            Text(tenant.question),
            Text(_short(run.before[tenant.name])),
            Text(_short(run.after[tenant.name])),
            f"{losses[0][1]:.2f} → {losses[-1][1]:.2f}",
        )
    batches = Text(
        f"batches: {run.stats['calls']:,} calls in {run.stats['batches']:,} batches, mean batch {run.stats['mean_batch']:.2f}, "
        f"{run.stats['mean_rows']:,.0f} rows each; {run.said.get('answers', 0)} chat replies; "
        f"{run.seconds:,.0f} s in total"
    )
    verdicts = [
        Text(f"{'✓' if passed else '✗'} {what}", style="green" if passed else "bold red") for passed, what in run.checks()
    ]
    return Group(answers, _memory(run), batches, *verdicts)


def _memory(run: Run) -> RenderableType:
    table = Table(title="memory, measured", title_justify="left")
    for column in ("process", "weights", "peak RSS", "less file pages"):
        table.add_column(column, justify="left" if column == "process" else "right")

    def add(name: str, weights: int, rss: int, own: int, **style: Any) -> None:
        table.add_row(name, _mb(weights), _mb(rss), _mb(own), **style)

    totals, copies, seen = run.totals(), len(run.tenants), run.rss
    add("executor", run.stats["bytes_held"], seen["executor"], seen["executor"] - run.file["executor"])
    for name in (tenant.name for tenant in run.tenants):
        add(f"tenant {name}", run.weights[name], seen[name], seen[name] - run.file[name])
    add("together", totals["weights"], totals["rss"], totals["own"], style="bold", end_section=True)
    add("plain fine-tuning process", run.copy["weights"], run.copy["rss"], run.copy["rss"] - run.copy["file"])
    add(f"{copies} × that", totals["copies_weights"], totals["copies_rss"], totals["copies_own"], style="bold")
    legend = (
        "weights: parameters each process uses, the base layers once in the executor. One plain process was measured and "
        f"multiplied. {_mb(run.copy['runtime'])} of every process are Python, torch, transformers and PEFT before any model. "
        "File pages (libraries, a checkpoint mapped by a CPU process) are in memory once per host even for plain copies; "
        "on a GPU, or in another dtype than the file's, each process has its own copy of the weights."
    )
    return Group(table, Text(legend, style="dim"))


def write(run: Run, path: Path) -> None:
    """Write all measurements as JSON."""
    figures = {
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
        "tenants": {
            tenant.name: {
                "method": tenant.method,
                "link": tenant.link,
                "question": tenant.question,
                "before": run.before[tenant.name],
                "after": run.after[tenant.name],
                "plain": run.plain.get(tenant.name),
                "losses": [round(loss, 4) for _, loss in run.losses[tenant.name]],
                "tokens_per_s": round(run.rates[tenant.name], 1),
            }
            for tenant in run.tenants
        },
        "memory_bytes": {
            "peak_rss": run.rss,
            "file_pages": run.file,
            "weights": run.weights,
            "plain_process": run.copy,
            "totals": run.totals(),
        },
        "executor": run.stats,
        "chat_answers": run.said.get("answers", 0),
        "verdicts": [{"held": passed, "what": what} for passed, what in run.checks()],
    }
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plot(run: Run, path: Path) -> None:
    """Plot losses, calls per batch and tokens/s over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, batch, rate) = pyplot.subplots(
        3, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 1.2, 1.2), layout="constrained"
    )
    for tenant, mark, colour in zip(run.tenants, _MARKS, _COLOURS, strict=True):
        seconds, values = zip(*run.losses[tenant.name], strict=True)
        style = {"marker": mark, "markersize": 4, "color": colour, "label": f"{tenant.name}: {tenant.method}"}
        losses.plot(seconds, values, **style)
        rate.plot(seconds, run.step_rates[tenant.name], **style)
    losses.set_ylabel("training loss")
    losses.set_ylim(bottom=0)
    losses.legend(frameon=False)
    losses.set_title("Three tenants fine-tune at once on one base model, a fourth chats")
    at = [each["at"] for each in run.polls]
    batch.plot(at, [each["mean_batch"] for each in run.polls], color="0.25")
    batch.set_ylabel("calls per batch")
    batch.set_ylim(bottom=0.9)
    rate.set_ylabel("tokens/s, each")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds since the start of training")
    for axes in (losses, batch, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _short(text: str) -> str:
    return " ".join(text.split())
