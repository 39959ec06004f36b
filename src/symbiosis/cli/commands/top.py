"""`symbiosis top`: an executor's figures, live."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, ConnectExecutor, Token

app = typer.Typer()


@app.command(epilog="Example: symbiosis top --interval 2")
def top(
    connect: ConnectExecutor = DEFAULT_ADDRESS,
    token: Token = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table (rates since the start) and exit.")] = False,
) -> None:
    """Watch an executor: tenants, batches, tokens/s, memory. Ctrl-C ends it.

    Where tenants have tokens, each sees itself; the token named `provider` sees all.
    """
    from symbiosis.app.executor import fetch_stats

    stats = fetch_stats(connect, token=token)
    if once:
        Console().print(figures_table(stats, None))
        return
    with suppress(KeyboardInterrupt), Live(figures_table(stats, None), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, stats = stats, fetch_stats(connect, token=token)
            live.update(figures_table(stats, before), refresh=True)


def figures_table(stats: dict[str, Any], before: dict[str, Any] | None) -> Table:
    """An executor's figures; rates are since `before`, or since its start."""
    seconds = max(1e-9, stats["uptime_s"] - (before["uptime_s"] if before else 0.0))
    old = before["tenants"] if before else {}
    table = Table(
        title=f"{escape(Path(stats['model']).name)} · {stats['policy']} · up {stats['uptime_s']:,.0f} s · "
        f"{stats['bytes_held'] / 1e6:,.0f} MB held",
        caption=f"{stats['calls']:,} calls in {stats['batches']:,} batches, mean batch {stats['mean_batch']:.2f}, "
        f"{stats['mean_rows']:,.0f} rows each · {stats['queued']} queued · "
        f"busy {100 * stats['busy_s'] / max(1e-9, stats['uptime_s']):.0f} %",
    )
    table.add_column("tenant")
    for column in ("sessions", "calls", "tokens", "tokens/s", "training rows", "mean wait", "errors"):
        table.add_column(column, justify="right")
    for tenant, figures in sorted(stats["tenants"].items()):
        if tenant == "top" and not figures["calls"]:
            continue  # that is us, looking
        rate = (figures["tokens"] - old.get(tenant, {}).get("tokens", 0)) / seconds
        table.add_row(
            escape(tenant),
            f"{figures['sessions']}",
            f"{figures['calls']:,}",
            f"{figures['tokens']:,}",
            f"{rate:,.1f}",
            f"{figures['training_rows']:,}",
            f"{figures['mean_wait_ms']:.2f} ms",
            f"{figures['errors']}",
        )
    return table
