"""The `symbiosis` command. Each file of `commands/` defines one subcommand.

Importing torch takes seconds, so commands import it when they run and `symbiosis --help` is immediate.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from symbiosis import __version__
from symbiosis.cli.commands import adapters, chat, cluster, demo, finetune, jobs, plan, profile, serve, simulate, top, zoo
from symbiosis.errors import SymbiosisError

err = Console(stderr=True)


class _Commands(TyperGroup):
    """Prints a `SymbiosisError` as one line, without a traceback."""

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
    "runs fine-tuning jobs: [bold]symbiosis finetune DATA.jsonl --hosted[/bold], then [bold]symbiosis jobs[/bold].",
)


def _unwrap_lines(docstring: str) -> str:
    """Typer prints the line breaks of a docstring. The terminal's width decides where lines break; paragraphs stay."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


for command in (serve, plan, chat, finetune, top, demo, adapters, jobs, profile, simulate, cluster, zoo):  # the order of --help
    for each in command.app.registered_commands:
        each.help = _unwrap_lines(each.help or getattr(each.callback, "__doc__", None) or "")
    app.add_typer(command.app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"symbiosis {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
