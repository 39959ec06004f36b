"""`symbiosis top`: live statistics of an executor."""

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
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table (rates since the start) and exit.")] = False,
) -> None:
    """Watch an executor: tenants, batches, tokens/s, memory. Ctrl-C stops.

    With tokens, a tenant sees its own row; the tenant named `provider` sees all.
    """
    from symbiosis.app.connect import fetch_stats

    stats = fetch_stats(connect, token=token)
    if once:
        Console().print(stats_table(stats, None))
        return
    with suppress(KeyboardInterrupt), Live(stats_table(stats, None), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, stats = stats, fetch_stats(connect, token=token)
            live.update(stats_table(stats, before), refresh=True)


def stats_table(stats: dict[str, Any], before: dict[str, Any] | None) -> Table:
    """Statistics of an executor as a table; rates are since `before`, or since its start."""
    seconds = max(1e-9, stats["uptime_s"] - (before["uptime_s"] if before else 0.0))
    old = before["tenants"] if before else {}
    table = Table(
        title=f"{escape(Path(stats['model']).name)} · {stats['policy']} · up {stats['uptime_s']:,.0f} s · "
        f"{stats['bytes_held'] / 1e6:,.0f} MB held",
        caption=f"{stats['calls']:,} calls in {stats['batches']:,} batches, mean batch {stats['mean_batch']:.2f}, "
        f"{stats['mean_rows']:,.0f} rows each · {stats['queued']} queued · "
        f"busy {100 * stats['busy_s'] / max(1e-9, stats['uptime_s']):.0f} %",
    )
    table.add_column("tenant", overflow="fold")
    for column in ("sessions", "calls", "tokens", "tokens/s", "training rows", "mean wait", "errors"):
        table.add_column(column, justify="right", overflow="fold")
    for tenant, row in sorted(stats["tenants"].items()):
        if tenant == "top" and not row["calls"]:
            continue  # the session of this command
        rate = (row["tokens"] - old.get(tenant, {}).get("tokens", 0)) / seconds
        table.add_row(
            escape(tenant),
            f"{row['sessions']}",
            f"{row['calls']:,}",
            f"{row['tokens']:,}",
            f"{rate:,.1f}",
            f"{row['training_rows']:,}",
            f"{row['mean_wait_ms']:.2f} ms",
            f"{row['errors']}",
        )
    return table
