"""`symbiosis zoo …`: many models of one family in a folder, each block once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from symbiosis.cli.commands import zoo_policies
from symbiosis.cli.demo_data import read_demo_text
from symbiosis.cli.loss_plot import check_plot_file
from symbiosis.cli.tables import print_fitting
from symbiosis.cli.views.surrogates import show_surrogates
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from symbiosis.zoo.zoo import Progress as Report
    from symbiosis.zoo.zoo import Zoo

err = Console(stderr=True)
app = typer.Typer(
    name="zoo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Many fine-tuned models of one family in a folder: each block of them once.",
    epilog="Example: symbiosis zoo add ./zoo ./my-fine-tune",
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The zoo.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="One of `symbiosis zoo list FOLDER`.", show_default=False)]


def _open(folder: Path, *, create: bool = False) -> Zoo:
    with err.status("Starting"):
        from symbiosis.zoo.zoo import Zoo
    return Zoo(folder, create=create)


@contextmanager
def _progress(title: str) -> Iterator[Report]:
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), console=err) as bars:
        task = bars.add_task(title)
        yield lambda what, done, total: bars.update(task, description=f"{title}: {what}", completed=done, total=total)


@app.command(epilog="Examples: symbiosis zoo add ./zoo ./my-fine-tune   symbiosis zoo add ./zoo ./my-lora --base my-fine-tune")
def add(
    folder: Folder,
    source: Annotated[
        Path,
        typer.Argument(
            help="A model as `save_pretrained` writes it, a GGUF file, or a PEFT adapter.", exists=True, show_default=False
        ),
    ],
    name: Annotated[str | None, typer.Option(help="(default: that of the folder or file)", show_default=False)] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The model that an adapter was made for; with --may-lose, the one to compare with (default: the nearest).",
            show_default=False,
        ),
    ] = None,
    may_lose: Annotated[
        float,
        typer.Option(
            help="Share of the loss gain over its base that a smaller chain may lose; nats per token where it has none. "
            "0 is exact."
        ),
    ] = 0.0,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Plain text of the kind that the model is for, some thousand tokens (default: the texts of the demo).",
            show_default=False,
        ),
    ] = None,
    recovery_steps: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Train a low-rank difference that keeps too little for so many steps, on what is left of the text. 0: none.",
        ),
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot what was measured.", show_default=False)] = None,
) -> None:
    """Add a model. Blocks that another model of the zoo has are not stored again; with --may-lose, a low-rank difference of
    another model, or blocks of it, may stand for the model.
    """
    if plot is not None:
        check_plot_file(plot)
    with err.status("Starting"):
        from symbiosis.cli.views.admission_view import plot_report, print_report
        from symbiosis.zoo.admission.admission import admit, check_may_lose
        from symbiosis.zoo.differences.recovery import RecoveryConfig
        from symbiosis.zoo.text_file import read_text
    check_may_lose(may_lose)
    sample = (text.name, read_text(text)) if text is not None else ("the demo's texts", read_demo_text())
    zoo, name = _open(folder, create=True), name or source.resolve().stem
    with _progress(f"Adding {name}") as report:
        recovery = RecoveryConfig(steps=recovery_steps) if recovery_steps else None
        admission = admit(zoo, name, source, may_lose=may_lose, text=sample, base=base, recovery=recovery, progress=report)
    print_report(admission.report)
    added, whole = admission.added, admission.added.manifest.size
    typer.echo(
        f"{name}: {added.new_blocks} of {len(added.manifest.chain)} blocks are new, {added.new_bytes / 1e6:,.1f} MB instead of "
        f"{whole / 1e6:,.1f}"
    )
    if json_file is not None:
        _write_json(json_file, admission.report.as_json())
    if plot is not None:
        plot_report(admission.report, plot)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SymbiosisError(f"the model is in the zoo, but {file} cannot be written: {error.strerror}") from None


@app.command("list", epilog="Example: symbiosis zoo list ./zoo")
def list_models(folder: Folder) -> None:
    """List the models, and what they take together."""
    zoo = _open(folder)
    manifests, usage = zoo.manifests(), zoo.usage()

    def make(without: tuple[str, ...]) -> Table:
        table = Table(caption=None if manifests else "none yet: `symbiosis zoo add FOLDER MODEL`")
        columns = [each for each in ("model", "blocks", "shared", "MB", "adapter of", "added") if each not in without]
        for column in columns:
            table.add_column(column, no_wrap=True, justify="right" if column in ("blocks", "shared", "MB") else "left")
        for manifest in manifests:
            users = zoo.users(manifest.name)
            cells = {
                "model": escape(manifest.name),
                "blocks": str(len(manifest.chain)),
                "shared": str(sum(bool(users[block.object.sha256]) for block in manifest.chain)),
                "MB": f"{manifest.size / 1e6:,.1f}",
                "adapter of": escape(manifest.provenance.get("base", "")) if manifest.adapter else "",
                "added": escape(manifest.provenance.get("added", "")),
            }
            table.add_row(*(cells[column] for column in columns))
        return table

    print_fitting(make, ("added", "adapter of", "shared"))
    saved = 1 - usage.bytes / usage.bytes_as_copies if usage.bytes_as_copies else 0.0
    typer.echo(
        f"{usage.models} models in {usage.blocks} blocks: {usage.bytes / 1e6:,.1f} MB, {saved:.1%} less than copies "
        f"({usage.bytes_as_copies / 1e6:,.1f} MB)"
    )


@app.command(epilog="Example: symbiosis zoo show ./zoo my-fine-tune")
def show(folder: Folder, name: Name) -> None:
    """Show the chain of a model: its blocks, and who shares them."""
    zoo = _open(folder)
    manifest, users = zoo.manifest(name), zoo.users(name)

    def make(without: tuple[str, ...]) -> Table:
        table = Table(title=escape(name))
        columns = [each for each in ("block", "hash", "MB", "shared with") if each not in without]
        for column in columns:
            table.add_column(column, no_wrap=True, justify="right" if column == "MB" else "left")
        for block in manifest.chain:
            others = users[block.object.sha256]
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            cells = {
                "block": str(block.place),
                "hash": block.object.sha256[:12],
                "MB": f"{block.object.size / 1e6:,.2f}",
                "shared with": escape(", ".join(others[:3])) + more,
            }
            table.add_row(*(cells[column] for column in columns))
        return table

    print_fitting(make, ("hash", "MB"))
    if manifest.surrogates:
        show_surrogates({piece: each.figures for piece, each in manifest.surrogates.items()})
    for key, value in sorted(manifest.provenance.items()):
        typer.echo(f"{key}: {value}")


@app.command(epilog="Example: symbiosis zoo surrogate ./zoo base --block 'ffn 12' --text ./calibration.txt")
def surrogate(
    folder: Folder,
    name: Name,
    block: Annotated[str, typer.Option(help="'ffn N', 'attention N' or 'layer N'.", show_default=False)],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Plain text: one part in eight is held out.", show_default=False)],
    keep: Annotated[float, typer.Option(help="Share of the block's channels and heads.")] = 0.5,
    tokens: Annotated[int, typer.Option(help="Most tokens of the text to use.", min=2560)] = 60_000,
    seconds: Annotated[float, typer.Option(help="Most time for the training.", min=1.0)] = 120.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Make a smaller block that stands in for one that is slow to reach: pruned, then distilled from it."""
    zoo = _open(folder)
    with err.status("Loading"):
        from symbiosis.models.device_dtype import resolve_device
        from symbiosis.zoo.surrogates.block_modules import Piece, module_path
        from symbiosis.zoo.surrogates.distillation import Training
        from symbiosis.zoo.surrogates.surrogate import (
            check_keep,
            load_tokenizer,
            make_surrogates,
            store_surrogate,
            tokenize,
        )
        from symbiosis.zoo.text_file import read_text

        piece, place = Piece.parse(block), resolve_device(device)
        check_keep(keep)
        content, tokenizer, model = read_text(text), load_tokenizer(zoo, name), zoo.load(name).to(place)
        module_path(model, piece)
        used, held_out = (ids.to(place) for ids in tokenize(tokenizer, content, tokens))
    with _progress(f"Surrogate of {piece}") as report:
        training = Training(seconds=seconds)
        made = make_surrogates(model, [piece], used, held_out, keep=keep, training=training, report=report)[piece]
    store_surrogate(zoo, name, piece, made)
    show_surrogates({str(piece): made.report.figures})


@app.command(epilog="Example: symbiosis zoo remove ./zoo my-fine-tune")
def remove(folder: Folder, name: Name) -> None:
    """Remove a model. `symbiosis zoo gc` frees the disk."""
    _open(folder).remove(name)
    typer.echo(f"{name} is removed; `symbiosis zoo gc {folder}` frees what no other model has")


@app.command(epilog="Example: symbiosis zoo gc ./zoo")
def gc(folder: Folder) -> None:
    """Remove blocks that no model has."""
    count, size = _open(folder).gc()
    typer.echo(f"removed {count} files, {size / 1e6:,.1f} MB")


@app.command(epilog="Example: symbiosis zoo verify ./zoo")
def verify(folder: Folder) -> None:
    """Hash all content again. Exit status 1 if something is missing or was changed."""
    zoo = _open(folder)
    with _progress("Verifying") as report:
        wrong = zoo.verify(report)
    for line in wrong:
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{len(zoo.names())} models are as they were added")


app.command(epilog=zoo_policies.PROFILE_EPILOG)(zoo_policies.profile)
app.command(epilog=zoo_policies.SIMULATE_EPILOG)(zoo_policies.simulate)
