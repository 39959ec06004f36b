"""`symbiosis adapters …`: manage the adapters of a server over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.commands.options import DEFAULT_URL, ConnectServer, Key
from symbiosis.cli.http_client import HttpClient
from symbiosis.cli.tables import print_fitting

_COLUMNS = ("adapter", "owner", "model", "hash", "MB", "pinned")
_OPTIONAL_COLUMNS = ("hash", "model", "MB", "pinned", "owner")
"""Columns that a narrow terminal omits, in this order."""

app = typer.Typer(
    name="adapters",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The adapters of a server: list, add, remove, pin.",
    epilog="Example: symbiosis adapters add pirate my-adapter",
)
Owner = Annotated[
    str | None, typer.Option("--owner", metavar="TENANT", show_default=False, help="The tenant that owns it, for the admin.")
]


@app.command("list", epilog="Example: symbiosis adapters list")
def list_adapters(connect: ConnectServer = DEFAULT_URL, key: Key = None) -> None:
    """List the adapters you can use; the admin sees those of all tenants."""
    found = HttpClient(connect, key).adapters()
    print_fitting(lambda without: adapters_table(found, without), _OPTIONAL_COLUMNS)


def adapters_table(found: list[dict[str, Any]], without: tuple[str, ...] = ()) -> Table:
    """Cells are never truncated; columns can be omitted."""
    table = Table(caption=None if found else "none yet: `symbiosis adapters add NAME FOLDER`")
    for name in (each for each in _COLUMNS if each not in without):
        table.add_column(name, no_wrap=True, justify="right" if name == "MB" else "left")
    for each in found:
        cells = {
            "adapter": escape(each["id"]),
            "owner": "all" if each["owner"] is None else escape(each["owner"]),
            "model": escape(each["parent"]),
            "hash": each["root"][:12],
            "MB": "" if each["bytes"] is None else f"{each['bytes'] / 1e6:,.2f}",
            "pinned": "yes" if each["pinned"] else "",
        }
        table.add_row(*(cell for name, cell in cells.items() if name not in without))
    return table


@app.command(epilog="Example: symbiosis adapters add pirate my-adapter")
def add(
    name: Annotated[str, typer.Argument(help="Name of the adapter in requests.")],
    folder: Annotated[Path, typer.Argument(help="A PEFT adapter, as `symbiosis finetune --out` writes it.")],
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Upload an adapter. An adapter of the same name is replaced."""
    adapter = HttpClient(connect, key).add_adapter(name, folder)
    owner = "for all tenants" if adapter["owner"] is None else f"of {adapter['owner']}"
    typer.echo(f"{adapter['id']} ({owner}) is served: symbiosis chat --adapter {adapter['id']} --connect {connect}")


@app.command(epilog="Example: symbiosis adapters remove pirate")
def remove(
    name: Annotated[str, typer.Argument(help="One of `symbiosis adapters list`.")],
    owner: Owner = None,
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Remove an adapter. Running requests finish with it."""
    HttpClient(connect, key).remove_adapter(name, owner)
    typer.echo(f"{name} is removed")


@app.command(epilog="Example: symbiosis adapters pin pirate")
def pin(
    name: Annotated[str, typer.Argument(help="One of `symbiosis adapters list`.")],
    off: Annotated[bool, typer.Option("--off", help="Unpin: it can be evicted again.")] = False,
    owner: Owner = None,
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Pin an adapter in device memory, so that it is not evicted. Admin only."""
    HttpClient(connect, key).pin_adapter(name, not off, owner)
    typer.echo(f"{name} is {'unpinned' if off else 'pinned'}")
