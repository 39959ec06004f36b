"""Surrogates of a model of a zoo, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from symbiosis.cli.tables import print_fitting

_TIMES = "time_"


def show_surrogates(figures: Mapping[str, Mapping[str, float]]) -> None:
    """One row for each surrogate, by what it stands for: agreement of the whole chain, and time relative to the block's."""
    rows = sorted({name.removeprefix(_TIMES) for each in figures.values() for name in each if name.startswith(_TIMES)}, key=int)
    times = {f"{count} rows": f"{_TIMES}{count}" for count in rows}

    def make(without: tuple[str, ...]) -> Table:
        caption = "same token, loss and cosine: of held-out text; time: share of the block's"
        table = Table(title="surrogates", caption=None if "caption" in without else caption)
        names = ("surrogate of", "weights", "same token", "loss", "cosine", *times)
        columns = [name for name in names if name not in without]
        for column in columns:
            table.add_column(column, no_wrap=True, justify="left" if column == "surrogate of" else "right")
        for piece, each in figures.items():
            cells = {
                "surrogate of": escape(piece),
                "weights": f"{each.get('parameters', 0):.0%}",
                "same token": f"{each.get('top1', 0):.1%}",
                "loss": f"{each.get('loss_change', 0):+.3f}",
                "cosine": f"{each.get('cosine', 0):.3f}",
                **{column: f"{each.get(name, 0):.2f}" for column, name in times.items()},
            }
            table.add_row(*(cells[column] for column in columns))
        return table

    print_fitting(make, ("caption", "weights", "cosine", *times))
