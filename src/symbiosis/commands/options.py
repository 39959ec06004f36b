"""What commands share: options, and how they were given."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_ADDRESS = "tcp://127.0.0.1:7777"
DEFAULT_SITE = "http://127.0.0.1:8000"

ConnectExecutor = Annotated[str, typer.Option("--connect", metavar="ADDRESS", help="Where the executor listens.")]
ConnectSite = Annotated[str, typer.Option("--connect", metavar="URL", help="Where `symbiosis serve --http` listens.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="SECRET", envvar="SYMBIOSIS_TOKEN", show_default=False, help="Your token, if it asks for one."
    ),
]
Name = Annotated[str, typer.Option("--name", help="How you show in the figures without a token.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="SECRET", envvar="SYMBIOSIS_KEY", show_default=False, help="Your key, if it asks for one."),
]


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed; neither its default nor the environment's."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
