"""The `symbiosis` command, put together from `commands/`, a file for each.

torch takes seconds to import, so every command imports what it needs itself:
`symbiosis --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from symbiosis import __version__
from symbiosis.cli.commands import adapters, chat, demo, finetune, jobs, serve, top
from symbiosis.errors import SymbiosisError

err = Console(stderr=True)


class _Commands(TyperGroup):
    """Errors made for people end as one line, not as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SymbiosisError as error:
            line = " ".join(str(error).split())
            err.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="symbiosis",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="One frozen base model, many tenants.\n\nStart with [bold]symbiosis serve[/bold] in one terminal and "
    "[bold]symbiosis chat[/bold] in another, or watch [bold]symbiosis demo[/bold]. A server ([bold]serve --http[/bold]) also "
    "fine-tunes for you: [bold]symbiosis finetune DATA.jsonl --hosted[/bold], then [bold]symbiosis jobs[/bold].",
)

for command in (serve, chat, finetune, top, demo, adapters, jobs):  # as --help lists them
    app.add_typer(command.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"symbiosis {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
