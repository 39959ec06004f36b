"""Measurements of a demo run, and their display: live table, report, plot, JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from symbiosis.cli.plain_baseline import STEPS
from symbiosis.cli.process_memory import ProcessMemory
from symbiosis.errors import SymbiosisError

Report = dict[str, Any]

# readable without colour
_MARKS = ("o", "s", "^")
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_FAILED = ("failed", "cancelled")
_PLAIN_STEPS = STEPS - 1
"""The first step allocates and is not counted."""


class DemoFailed(SymbiosisError):
    """A part of the demo ended early."""

    code = "demo_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A tenant that fine-tunes on demo_data/NAME.jsonl."""

    name: str
    method: str
    lr: float
    question: str
    """Prompt before and after training; not in the data."""


@dataclass(slots=True)
class Run:
    """Measurements of one demo run."""

    tenants: tuple[Tenant, ...]
    steps: int
    seconds: float = 0.0
    training_s: float = 0.0
    """From the creation of the first job to the end of the last."""
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, Report] = field(default_factory=dict)
    """The job of each tenant, as the server last described it."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    adapter_bytes: dict[str, int] = field(default_factory=dict)
    replies: list[Report] = field(default_factory=list)
    """Replies to the tenant that chats: question, text, seconds to the first token and in total."""
    failure: str | None = None
    server_memory: ProcessMemory = field(default_factory=ProcessMemory)
    """Peak of all processes of the server while it trains and replies."""
    idle_memory: ProcessMemory = field(default_factory=ProcessMemory)
    """All processes of the server before any job."""
    chat_memory: ProcessMemory = field(default_factory=ProcessMemory)
    """Peak of one plain process that chats."""
    has_chatted: bool = False
    """Whether the plain process is past its chat."""
    plain_memory: ProcessMemory = field(default_factory=ProcessMemory)
    """Peak of one plain process that fine-tunes."""
    plain_steps_per_s: float | None = None
    weight_bytes: int = 0
    """Size of the base model's weights."""

    @property
    def has_trained(self) -> bool:
        """Whether all jobs have succeeded."""
        return len(self.jobs) == len(self.tenants) and all(job["status"] == "succeeded" for job in self.jobs.values())

    def take_jobs(self, jobs: dict[str, Report]) -> None:
        """Raises `DemoFailed` if a job or the chat failed."""
        self.jobs = jobs
        for name, job in jobs.items():
            if job["status"] in _FAILED:
                raise DemoFailed(f"{name} failed: {(job['error'] or {}).get('message', job['status'])}")
        if self.failure is not None:
            raise DemoFailed(self.failure)

    def take_plain(self, report: Report) -> None:
        """Raises `DemoFailed` if the plain process failed."""
        if report["what"] == "failed":
            raise DemoFailed(f"{report['who']} failed: {report['reason']}")
        if report["what"] == "chat":
            self.has_chatted = True
        elif report["what"] == "plain":
            self.plain_steps_per_s = report["steps_per_s"]
        else:
            self.plain[report["who"]] = report["text"]

    def measure_server(self, seen: ProcessMemory) -> None:
        self.server_memory = max(self.server_memory, seen, key=lambda each: each.total)

    def measure_plain(self, seen: ProcessMemory) -> None:
        if not self.has_chatted:
            self.chat_memory = max(self.chat_memory, seen, key=lambda each: each.total)
        elif self.plain_steps_per_s is None:  # not yet comparing texts
            self.plain_memory = max(self.plain_memory, seen, key=lambda each: each.total)

    @property
    def copies_memory(self) -> ProcessMemory:
        """A plain process for each tenant: those that fine-tune, and the one that chats."""
        return self.plain_memory.times(len(self.tenants)).plus(self.chat_memory)

    def ends(self, tenant: str) -> tuple[float, float]:
        """Mean loss of the first and the last quarter of the steps, since single batches are noisy."""
        losses = self.losses[tenant]
        some = max(1, len(losses) // 4)
        return sum(losses[:some]) / some, sum(losses[-some:]) / some

    def checks(self) -> list[tuple[bool, str]]:
        """Each claim of the demo and whether it holds."""
        found = []
        for tenant in self.tenants:
            name, (first, last) = tenant.name, self.ends(tenant.name)
            found.append((last < first, f"{name}: loss fell ({first:.2f} → {last:.2f})"))
            found.append((self.before[name] != self.after[name], f"{name}: the answer changed"))
            same = self.plain.get(name) == self.after[name]
            found.append((same, f"{name}: plain transformers + PEFT gives the same text with the adapter of the server"))
        less = self.server_memory.total < self.copies_memory.total
        found.append((less, f"memory: one server needs less than {len(self.tenants) + 1} plain processes"))
        return found


def view(run: Run) -> RenderableType:
    """The live table."""
    table = Table(title="one base model, four tenants", title_justify="left")
    for column in ("tenant", "does", "step", "loss", "tokens/s"):
        table.add_column(column, justify="left" if column in ("tenant", "does") else "right", overflow="fold")
    for tenant in run.tenants:
        job: Report = run.jobs.get(tenant.name, {"status": "queued", "progress": {}})
        progress = job["progress"]
        loss, rate = progress.get("train_loss"), progress.get("tokens_per_s")
        table.add_row(
            tenant.name,
            f"trains {tenant.method}",
            "done" if job["status"] == "succeeded" else f"{progress.get('step', 0)}/{run.steps}",
            "…" if loss is None else f"{loss:.2f}",
            "…" if rate is None else f"{rate:,.0f}",
        )
    table.add_row("chatter", f"chats, {len(run.replies)} replies", "", "", "")
    lines: list[RenderableType] = [table]
    if run.replies:
        last = run.replies[-1]
        lines.append(Text(f"chatter: {last['question']} — {_short(last['text'])} ({last['total_s']:.1f} s)", style="dim"))
    return Group(*lines)


def report(run: Run) -> RenderableType:
    """The final report: replies, losses, memory, speed, checks."""
    answers = Table(title="before and after", title_justify="left", show_lines=True)
    for column in ("tenant", "asked", "before", "after", "loss", "adapter"):
        answers.add_column(column, overflow="fold")
    for tenant in run.tenants:
        first, last = run.ends(tenant.name)
        answers.add_row(
            f"{tenant.name}\n({tenant.method})",
            Text(tenant.question),
            Text(_short(run.before[tenant.name])),
            Text(_short(run.after[tenant.name])),
            f"{first:.2f} → {last:.2f}",
            f"{run.adapter_bytes[tenant.name] / 1e6:.1f} MB",
        )
    verdicts = [
        Text(f"{'✓' if passed else '✗'} {what}", style="green" if passed else "bold red") for passed, what in run.checks()
    ]
    return Group(answers, _memory(run), Text(_speed(run)), *verdicts)


def _speed(run: Run) -> str:
    together = len(run.tenants) * run.steps / run.training_s
    text = f"speed: {together:.2f} optimizer steps/s of {len(run.tenants)} tenants together, during the chat; "
    text += (
        f"{run.plain_steps_per_s or 0:.2f} of one plain process afterwards, with as many threads, over {_PLAIN_STEPS} steps. "
    )
    if run.replies:
        first, total = (statistics.median(reply[key] for reply in run.replies) for key in ("first_s", "total_s"))
        text += (
            f"Meanwhile {len(run.replies)} chat replies: first token after {first:.1f} s, all after {total:.1f} s (medians). "
        )
    return f"{text}{run.seconds:,.0f} s in total"


def _memory(run: Run) -> RenderableType:
    table = Table(title="memory, measured at its peak", title_justify="left")
    for column in ("", "own pages", "file pages", "together"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")

    def add(what: str, memory: ProcessMemory, **style: Any) -> None:
        table.add_row(what, _mb(memory.own), _mb(memory.files), _mb(memory.total), **style)

    copies = len(run.tenants)
    add("one server before any job", run.idle_memory)
    add(f"… with {copies} jobs and a chat", run.server_memory, style="bold", end_section=True)
    add("a plain process that fine-tunes", run.plain_memory)
    add("a plain process that chats", run.chat_memory)
    add(f"{copies} that fine-tune and one that chats", run.copies_memory, style="bold")
    legend = (
        "Own pages belong to one process. File pages are libraries and the checkpoint: on a CPU, in the file's dtype, they are "
        "in memory once for all processes, and are counted once. One process of each kind was measured. "
        f"On a GPU the weights ({_mb(run.weight_bytes)} here) are own pages too: every plain process has a "
        "copy, the server one."
    )
    return Group(table, Text(legend, style="dim"))


def write(run: Run, path: Path) -> None:
    """Write all measurements as JSON."""
    figures = {
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
        "training_seconds": round(run.training_s, 1),
        "plain_steps_per_s": run.plain_steps_per_s,
        "tenants": {
            tenant.name: {
                "method": tenant.method,
                "question": tenant.question,
                "before": run.before[tenant.name],
                "after": run.after[tenant.name],
                "plain": run.plain.get(tenant.name),
                "losses": [round(loss, 4) for loss in run.losses[tenant.name]],
                "adapter_bytes": run.adapter_bytes[tenant.name],
            }
            for tenant in run.tenants
        },
        "memory_bytes": {
            "server": asdict(run.server_memory),
            "idle_server": asdict(run.idle_memory),
            "plain_process": asdict(run.plain_memory),
            "plain_chat": asdict(run.chat_memory),
            "plain_processes": asdict(run.copies_memory),
        },
        "chat_replies": run.replies,
        "verdicts": [{"held": passed, "what": what} for passed, what in run.checks()],
    }
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plot(run: Run, path: Path) -> None:
    """Plot the losses, and the memory of the server next to that of plain processes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for tenant, mark, colour in zip(run.tenants, _MARKS, _COLOURS, strict=True):
        values = run.losses[tenant.name]
        label = f"{tenant.name}: {tenant.method}"
        losses.plot(range(1, len(values) + 1), values, marker=mark, markersize=4, color=colour, label=label)
    losses.set(xlabel="step", ylabel="training loss", title="Three tenants fine-tune at once")
    losses.set_ylim(bottom=0)
    losses.legend(frameon=False)
    groups = {"one server": run.server_memory, f"{len(run.tenants) + 1} plain processes": run.copies_memory}
    own, files = ([getattr(each, part) / 1e6 for each in groups.values()] for part in ("own", "files"))
    memory.bar(list(groups), own, color="0.35", label="own pages")
    memory.bar(list(groups), files, bottom=own, color="0.75", label="file pages, once")
    memory.set(ylabel="MB", title="Memory at its peak")
    memory.legend(frameon=False)
    for axes in (losses, memory):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _short(text: str) -> str:
    return " ".join(text.split())
