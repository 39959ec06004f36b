"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symbiosis.errors import BadAddress, SymbiosisError

DEFAULT_ADDRESS = "tcp://127.0.0.1:7777"
DEFAULT_URL = "http://127.0.0.1:8000"

ConnectExecutor = Annotated[str, typer.Option("--connect", metavar="ADDRESS", help="Where the executor listens.")]
ConnectServer = Annotated[str, typer.Option("--connect", metavar="URL", help="Where `symbiosis serve --http` listens.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="SECRET",
        envvar="SYMBIOSIS_TOKEN",
        show_default=False,
        help="Your token, if the executor requires one.",
    ),
]
Name = Annotated[str, typer.Option("--name", help="Your name in the statistics, without a token.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="SECRET", envvar="SYMBIOSIS_KEY", show_default=False, help="Your key, if the server requires one."
    ),
]
ShutdownDelay = Annotated[
    float,
    typer.Option(
        "--shutdown-delay",
        metavar="SECONDS",
        min=0,
        max=3600,
        help="At SIGTERM requests are served for so long, while /ready is 503 already: load balancers find another server.",
    ),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        "--ready-file",
        metavar="FILE",
        show_default=False,
        help="Exists while all engines of this host are in the cluster: for a readiness probe. Not with --ray.",
    ),
]


def is_url(address: str) -> bool:
    """Whether an address is that of HTTP; otherwise it is an executor's. Raises `BadAddress` if it is neither."""
    scheme, mark, _ = address.partition("://")
    if not mark or scheme not in ("http", "https", "tcp", "shm"):
        host_and_port = address.rpartition("://")[2]
        raise BadAddress(
            f"{address!r} is not an address: expected http://HOST:PORT for a server over HTTP (port 8000 by default), or "
            "tcp://HOST:PORT (port 7777 by default) or shm://NAME for its executor"
            + (f"; is it http://{host_and_port}?" if ":" in host_and_port else "")
        )
    return scheme in ("http", "https")


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, and not a default or from the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_out(out: Path) -> None:
    """Check that a folder is new or empty, since nothing is overwritten. Raises `SymbiosisError`."""
    try:
        is_free = not out.exists() or not any(out.iterdir())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SymbiosisError(f"cannot write to {str(out)!r}: {reason}; choose another folder with --out") from None
    if not is_free:
        raise SymbiosisError(f"{out} is not empty: choose another folder with --out")
