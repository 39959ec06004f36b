"""`symbiosis adapters …`: the adapters of a server, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.commands.options import DEFAULT_SITE, ConnectSite, Key
from symbiosis.cli.http_client import HttpClient

app = typer.Typer(
    name="adapters",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The adapters of a server: list, add, remove, pin.",
    epilog="Example: symbiosis adapters add pirate my-adapter",
)
Owner = Annotated[
    str | None, typer.Option("--owner", metavar="TENANT", show_default=False, help="Whose it is, if you are the admin.")
]


@app.command("list", epilog="Example: symbiosis adapters list")
def list_adapters(connect: ConnectSite = DEFAULT_SITE, key: Key = None) -> None:
    """Which adapters you can use; the admin sees everybody's."""
    Console().print(adapters_table(HttpClient(connect, key).adapters()))


def adapters_table(found: list[dict[str, Any]]) -> Table:
    table = Table(caption=None if found else "none yet: `symbiosis adapters add NAME FOLDER`")
    table.add_column("adapter", overflow="fold")  # a name is to be copied
    for column in ("of", "on", "content"):
        table.add_column(column)
    table.add_column("MB", justify="right")
    table.add_column("pinned")
    for each in found:
        size = "" if each["bytes"] is None else f"{each['bytes'] / 1e6:,.2f}"
        owner = "everybody" if each["owner"] is None else escape(each["owner"])
        table.add_row(
            escape(each["id"]), owner, escape(each["parent"]), each["root"][:12], size, "yes" if each["pinned"] else ""
        )
    return table


@app.command(epilog="Example: symbiosis adapters add pirate my-adapter")
def add(
    name: Annotated[str, typer.Argument(help="What requests will call it.")],
    folder: Annotated[Path, typer.Argument(help="A PEFT adapter, as `symbiosis finetune --out` writes it.")],
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
) -> None:
    """Upload an adapter; one of that name is replaced."""
    made = HttpClient(connect, key).add_adapter(name, folder)
    whose = "for everybody" if made["owner"] is None else f"of {made['owner']}"
    typer.echo(f"{made['id']} ({whose}) is served: symbiosis chat --adapter {made['id']} --connect {connect}")


@app.command(epilog="Example: symbiosis adapters remove pirate")
def remove(
    name: Annotated[str, typer.Argument(help="One of `symbiosis adapters list`.")],
    owner: Owner = None,
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
) -> None:
    """Remove an adapter; who is being answered ends with it."""
    HttpClient(connect, key).remove_adapter(name, owner)
    typer.echo(f"{name} is removed")


@app.command(epilog="Example: symbiosis adapters pin pirate")
def pin(
    name: Annotated[str, typer.Argument(help="One of `symbiosis adapters list`.")],
    off: Annotated[bool, typer.Option("--off", help="Let it go like any other again.")] = False,
    owner: Owner = None,
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
) -> None:
    """Keep an adapter in the device's memory though nobody asks for it. The admin's."""
    HttpClient(connect, key).pin_adapter(name, not off, owner)
    typer.echo(f"{name} is {'not pinned any more' if off else 'pinned'}")
