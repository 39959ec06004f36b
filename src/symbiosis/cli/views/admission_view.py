"""What admission measured of a model: a table, and a plot of loss against bytes."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from symbiosis.cli.loss_plot import save_figure
from symbiosis.cli.tables import print_fitting
from symbiosis.zoo.admission.report import AdmissionReport, Candidate, Limit, Verdict

_COLUMNS = ("verdict", "what", "MB", "loss", "gain kept", "KL", "cosine", "top-1", "admitted")
_LEFT = ("verdict", "what", "admitted")
_COLORS = {Verdict.DIFFERENCE: "#1a73e8", Verdict.SHARED: "#e8710a"}


def print_report(report: AdmissionReport) -> None:
    if report.note:
        typer.echo(f"{report.name}: {report.verdict}: {report.note}")
        return
    if report.predict is None or report.confirm is None:
        return
    limit = report.predict

    def make(without: tuple[str, ...]) -> Table:
        table = Table(title=f"{report.name} against {report.base}: {report.tokens} tokens of {report.text}")
        columns = [each for each in _COLUMNS if each not in without]
        for column in columns:
            table.add_column(column, no_wrap=True, justify="left" if column in _LEFT else "right")
        for candidate in report.candidates:
            cells = _cells(candidate)
            table.add_row(*(cells[column] for column in columns), style="bold" if candidate.is_admitted else "")
        return table

    print_fitting(make, ("what", "top-1", "cosine", "KL"))
    typer.echo(f"base: loss {limit.loss_of_base:.4f}; model: {limit.loss_of_model:.4f}; {describe_limit(limit)}")
    typer.echo(f"{report.name}: {report.verdict}")
    chosen = report.admitted
    if chosen is not None and chosen.confirmed is not None:
        kept = report.confirm.kept(chosen.confirmed)
        shown = f"KL {chosen.confirmed.divergence:.4f}" if kept is None else f"{kept:.1%} of the gain kept"
        typer.echo(
            f"second half of the text: loss {chosen.confirmed.loss:.4f}, predicted {report.predicted_loss:.4f}; {shown}, "
            f"cosine {chosen.confirmed.cosine:.4f}, top-1 {chosen.confirmed.top1:.4f}"
        )


def describe_limit(limit: Limit) -> str:
    if limit.has_gain:
        return f"gain {limit.gain:.4f}, of which a chain may lose {limit.may_lose:.1%}"
    return f"no gain on this text, so a chain may diverge by {limit.may_lose:g} nats per token"


def _cells(candidate: Candidate) -> dict[str, str]:
    found = candidate.predicted
    return {
        "verdict": str(candidate.verdict),
        "what": candidate.what,
        "MB": f"{candidate.new_bytes / 1e6:,.1f}",
        "loss": f"{found.loss:.4f}",
        "gain kept": "" if candidate.kept is None else f"{candidate.kept:.1%}",
        "KL": f"{found.divergence:.4f}",
        "cosine": f"{found.cosine:.4f}",
        "top-1": f"{found.top1:.4f}",
        "admitted": "yes" if candidate.is_admitted else candidate.refusal or "larger",
    }


def plot_report(report: AdmissionReport, file: Path) -> None:
    """Loss of each candidate against the bytes that it takes. Raises `SymbiosisError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for verdict, color in _COLORS.items():
        of_verdict = [each for each in report.candidates if each.verdict is verdict]
        if of_verdict:
            axes.scatter([each.new_bytes / 1e6 for each in of_verdict], [each.predicted.loss for each in of_verdict],
                         color=color, label=str(verdict))  # fmt: skip
    if report.admitted is not None:
        chosen = report.admitted
        axes.scatter([chosen.new_bytes / 1e6], [chosen.predicted.loss], s=160, facecolors="none", edgecolors="black",
                     label="admitted")  # fmt: skip
    if report.predict is not None:
        axes.axhline(report.predict.loss_of_base, color="#9aa0a6", linestyle="--", label=f"base: {report.base}")
        axes.axhline(report.predict.loss_of_model, color="#34a853", linestyle="--", label="own blocks")
    axes.set(xlabel="MB that it takes", ylabel="loss, nats per token", title=report.name)
    axes.set_xscale("symlog")
    axes.grid(alpha=0.3)
    if report.predict is not None:  # a model that the zoo has needs no measurement
        axes.legend()
    save_figure(figure, file)
