"""`symbiosis top`: live statistics of a server."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, Key, Token

app = typer.Typer()


@app.command(epilog="Example: symbiosis top --interval 2")
def top(
    connect: Annotated[
        str, typer.Option("--connect", metavar="ADDRESS", help="Where the executor listens, or the URL of `serve --http`.")
    ] = DEFAULT_ADDRESS,
    token: Token = None,
    key: Key = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once (rates since the start) and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all statistics once as JSON and exit.")] = False,
) -> None:
    """Watch a server: tenants, batches, tokens/s, jobs, adapters, memory by owner. Ctrl-C stops.

    With tokens, a tenant sees its own row; the tenant named `provider` sees all. Over HTTP, the admin's key is needed.
    """
    stats = _fetch(connect, token, key)
    if as_json:
        typer.echo(json.dumps(stats, indent=2))
        return
    console = Console()
    if once:
        console.print(_view(stats, None, console))
        return
    with suppress(KeyboardInterrupt), Live(_view(stats, None, console), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, stats = stats, _fetch(connect, token, key)
            live.update(_view(stats, before, console), refresh=True)


def _fetch(address: str, token: str | None, key: str | None) -> dict[str, Any]:
    if address.startswith(("http://", "https://")):
        from symbiosis.cli.http_client import HttpClient

        return HttpClient(address, key).statistics()
    from symbiosis.app.connect import fetch_stats

    return fetch_stats(address, token=token)


def _view(stats: dict[str, Any], before: dict[str, Any] | None, console: Console) -> RenderableType:
    from symbiosis.cli.views.statistics_view import render

    return render(stats, before, console.width)
