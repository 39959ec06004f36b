"""The engines of a cluster as a table."""

from __future__ import annotations

from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.tables import print_fitting

_COLUMNS = ("engine", "status", "address", "running", "waiting", "KV blocks", "adapters", "jobs", "tokens")
_OPTIONAL_COLUMNS = ("tokens", "address", "jobs", "adapters")
"""Columns that a narrow terminal omits, in this order."""


def print_cluster(statistics: dict[str, Any]) -> None:
    """`statistics` are those of a cluster's front door."""
    engines, cluster = statistics["engines"], statistics["cluster"]
    print_fitting(lambda without: _status_table(engines, without), _OPTIONAL_COLUMNS)
    ready = sum(engine["status"] == "ready" for engine in engines.values())
    typer.echo(
        f"{statistics['model']}: engines ready: {ready}, wanted: {cluster['wanted']}; requests: {cluster['placed']}, "
        f"waiting for an engine: {cluster['waiting']}; migrations: {cluster['migrations']}"
    )


def _status_table(engines: dict[str, Any], without: tuple[str, ...]) -> Table:
    table = Table(caption=None if engines else "no engine has joined yet")
    for name in (each for each in _COLUMNS if each not in without):
        table.add_column(name, no_wrap=True, justify="left" if name in ("engine", "status", "address") else "right")
    for name, engine in sorted(engines.items()):
        cells = {
            "engine": escape(name),
            "status": engine["status"],
            "address": escape(engine["address"].removeprefix("tcp://")),
            "running": str(engine["running"]),
            "waiting": str(engine["waiting"]),
            "KV blocks": f"{engine['blocks'] - engine['blocks_free']:,} of {engine['blocks']:,}",
            "adapters": str(engine["adapters"]),
            "jobs": str(engine["jobs"]),
            "tokens": f"{engine['tokens']:,}",
        }
        table.add_row(*(cell for column, cell in cells.items() if column not in without))
    return table
