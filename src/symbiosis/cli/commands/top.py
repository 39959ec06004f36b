"""`symbiosis top`: live statistics of a server."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, Key, Token, is_url

err = Console(stderr=True)

app = typer.Typer()
_FORBIDDEN = 403


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

    With tokens, a tenant sees its own row; the tenant named `provider` sees all. Over HTTP, --key must be the admin's key.

    "all tokens/s" adds up the columns of tokens: split, prompt, generated and trained. It is the mean since the last
    refresh; at first, and with --once, since the server started. "packed weights" are a second copy of the base weights, in
    the layout that a CPU multiplies fastest.
    """
    with err.status(f"Connecting to {connect}"):
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
    if is_url(address):
        from symbiosis.cli.http_client import HttpClient, HttpError

        try:
            return HttpClient(address, key).statistics()
        except HttpError as error:
            if error.status != _FORBIDDEN:
                raise
            raise HttpError(
                f"{error}. Pass it as --key; or see your own row at the executor, with your token: "
                "symbiosis top --connect tcp://HOST:PORT --token SECRET",
                error.status,
            ) from None
    from symbiosis.transport.statistics_client import fetch_statistics  # without torch, whose import takes seconds

    return fetch_statistics(address, token=token)


def _view(stats: dict[str, Any], before: dict[str, Any] | None, console: Console) -> RenderableType:
    from symbiosis.cli.views.statistics_view import render

    return render(stats, before, console.width)
