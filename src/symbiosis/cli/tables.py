"""Tables that are never cut: columns are left out at a narrow terminal, and ids stay whole."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

_ANY_WIDTH = 10_000


def print_fitting(make_table: Callable[[tuple[str, ...]], Table], optional_columns: tuple[str, ...]) -> None:
    """Print `make_table(without)` with as many columns as the terminal has room for; all of them to a file or pipe.

    `optional_columns` are left out in their order. Columns of the table are `no_wrap`: the remaining ones keep their width.
    """
    console = Console()
    for less in range(len(optional_columns) + 1):
        table = make_table(optional_columns[:less])
        needed = Console(width=_ANY_WIDTH).measure(table).maximum
        if needed <= console.width or not console.is_terminal:
            break
    Console(width=max(console.width, needed)).print(table)
