"""`symbiosis demo`: several tenants on the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer()


@app.command(epilog="Example: symbiosis demo --out demo-out --steps 12")
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for adapters, results and the plot.")] = Path(
        "demo-out"
    ),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each tenant.")] = 12,
) -> None:
    """Three tenants fine-tune at once on one server (LoRA, IA3, DoRA) while a fourth chats: about 3 minutes."""
    from symbiosis.cli.demo import run_demo

    if not run_demo(out, steps, Console()):
        raise typer.Exit(1)
