"""`symbiosis finetune`: trains an adapter in this process over an executor, or with --hosted on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symbiosis.cli.commands import jobs
from symbiosis.cli.commands.options import DEFAULT_ADDRESS, DEFAULT_URL, Key, Name, Token, check_out, is_given, is_url
from symbiosis.cli.demo_data import find_data
from symbiosis.cli.loss_trend import training_warning
from symbiosis.errors import SymbiosisError
from symbiosis.transport.addresses import address_scheme, not_an_address

if TYPE_CHECKING:
    from symbiosis.cli.local_finetune import StepReport

err = Console(stderr=True)

app = typer.Typer()


@app.command(
    epilog="Example: symbiosis finetune chats.jsonl --out my-adapter --method lora --rank 8 --epochs 3\n\n"
    "By a server: symbiosis finetune pirate --hosted --suffix pirate --epochs 2 --lr 2e-3"
)
def finetune(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.jsonl",
            help='A line per example: {"messages": [{"role", "content"} …]}, {"text": …} or {"prompt": …, "completion": …}; '
            "or the name of a data set of the package: pirate, kettle or gardener.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            show_default=False,
            help="A new or empty folder for the adapter; with --hosted, the finished adapter is copied there.",
        ),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            "--url",
            metavar="ADDRESS",
            show_default=False,
            help=f"Where the executor listens. (default: {DEFAULT_ADDRESS}; with --hosted {DEFAULT_URL})",
        ),
    ] = None,
    token: Token = None,
    key: Key = None,
    name: Name = "finetune",
    hosted: Annotated[
        bool, typer.Option("--hosted", help="Train on a server (`symbiosis serve --http`): nothing is computed here.")
    ] = False,
    validation: Annotated[
        Path | None, typer.Option("--validation", metavar="FILE", show_default=False, help="Validation data. Hosted only.")
    ] = None,
    suffix: Annotated[str | None, typer.Option(show_default=False, help="Part of the adapter's name. Hosted only.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", show_default=False, help="Plot of the loss. Hosted only.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="lora, rslora, dora, ia3, prefix, prompt or ptuning; loha, lokr, vera and oft too, but not with --hosted."
        ),
    ] = "lora",
    rank: Annotated[int | None, typer.Option(show_default=False, help="Of the methods that have one. (default: 8)")] = None,
    alpha: Annotated[float | None, typer.Option(show_default=False, help="LoRA alpha. (default: 2 × rank)")] = None,
    targets: Annotated[
        str | None,
        typer.Option(show_default=False, help="Layers to adapt, as q_proj,v_proj or all-linear. (default: PEFT's choice)"),
    ] = None,
    virtual_tokens: Annotated[
        int | None, typer.Option("--virtual-tokens", show_default=False, help="Length of a prefix or prompt. (default: 16)")
    ] = None,
    lr: Annotated[float | None, typer.Option(show_default=False, help="(default: the method's own)")] = None,
    epochs: Annotated[float | None, typer.Option(show_default=False, help="May be a fraction. (default: 3)")] = None,
    steps: Annotated[int | None, typer.Option(show_default=False, help="In place of epochs.")] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Examples per step. Hosted: chosen by the size of the data, unless given.")
    ] = 4,
    max_length: Annotated[
        int,
        typer.Option(
            "--max-length",
            help="Longer examples are truncated. (hosted: 2048, or the model's maximum length)",
        ),
    ] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the adapter's initialisation and of the order of examples.")] = 0,
) -> None:
    """Train an adapter on your chats or texts; the result is a plain PEFT folder.

    With --hosted a server trains and serves the adapter; options not given take the defaults of the server.
    """
    data = find_data(data)
    if hosted:
        for option in ("token", "name"):
            if is_given(ctx, option):
                raise SymbiosisError(
                    f"--{option} applies to training through an executor; with --hosted the server identifies you by --key"
                )
        hyperparameters = {
            "peft_method": method,
            "rank": rank,
            "alpha": alpha,
            "targets": None if targets is None else "all-linear" if targets == "all-linear" else targets.split(","),
            "virtual_tokens": virtual_tokens,
            "learning_rate": lr,
            "n_epochs": epochs,
            "n_steps": steps,
            "batch_size": batch_size if is_given(ctx, "batch_size") else None,
            "max_length": max_length if is_given(ctx, "max_length") else None,
        }
        jobs.finetune(
            connect or DEFAULT_URL,
            key,
            data,
            validation,
            suffix=suffix,
            seed=seed,
            hyperparameters={each: value for each, value in hyperparameters.items() if value is not None},
            out=out,
            plot=plot,
        )
        return
    for option in ("validation", "suffix", "plot", "key"):
        if is_given(ctx, option):
            raise SymbiosisError(f"--{option} applies to training on a server: add --hosted")
    if out is None:
        raise SymbiosisError("no output folder: add --out FOLDER")
    check_out(out)
    if not address_scheme(connect or DEFAULT_ADDRESS) or is_url(connect or DEFAULT_ADDRESS):
        raise not_an_address(connect)
    from symbiosis.app.connect import connect as connect_to
    from symbiosis.cli.local_finetune import FinetuneConfig, read_samples
    from symbiosis.cli.local_finetune import finetune as train

    config = FinetuneConfig(
        method=method,
        rank=rank,
        alpha=alpha,
        targets=tuple(part.strip() for part in targets.split(",")) if targets else None,
        virtual_tokens=virtual_tokens,
        lr=lr,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
    )
    samples = read_samples(data)  # before connecting, so that bad data is reported at once
    model = connect_to(connect or DEFAULT_ADDRESS, token=token, name=name)
    session: Any = model.symbiosis
    try:
        with _training_bar() as on_step:
            result = train(model, session.tokenizer(), samples, out, config, on_step)
    finally:
        session.close()
    err.print(
        f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}, {result.tokens_per_s:,.0f} tokens/s, "
        f"{result.trained_parameters:,} parameters trained on {'answers' if result.only_answers else 'all tokens'}",
        highlight=False,
    )
    typer.echo(f"adapter written to {out}")
    if (warning := training_warning(result.losses)) is not None:
        err.print(f"warning: {warning}", soft_wrap=True, highlight=False)


@contextmanager
def _training_bar() -> Iterator[Callable[[StepReport], None]]:
    """A live progress bar with loss and tokens/s; yields the callback for each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[status]}"), console=err) as progress:
        task = progress.add_task("Training", total=None, status="", visible=False)

        def on_step(step: StepReport) -> None:
            status = f"loss {step.loss:.3f}  {step.tokens / max(step.seconds, 1e-9):,.0f} tokens/s"
            progress.update(task, completed=step.number, total=step.steps, status=status, visible=True)

        yield on_step
