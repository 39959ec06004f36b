"""What commands share: options, how they were given, and what holds for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symbiosis.errors import SymbiosisError

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


def check_out(out: Path) -> None:
    """Nothing of the user's is overwritten: an adapter is written to a folder that is new or empty. Raises `SymbiosisError`."""
    try:
        is_free = not out.exists() or not any(out.iterdir())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SymbiosisError(f"cannot write to {str(out)!r}: {reason}; choose another folder with --out") from None
    if not is_free:
        raise SymbiosisError(f"{out} is not empty, and nothing is overwritten; choose another folder with --out")
