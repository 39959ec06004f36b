"""`symbiosis finetune`: an adapter trained here over an executor, or with --hosted by a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symbiosis.cli.commands import jobs
from symbiosis.cli.commands.options import DEFAULT_ADDRESS, DEFAULT_SITE, Key, Name, Token, check_out, is_given
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from symbiosis.cli.local_finetune import StepReport

err = Console(stderr=True)

app = typer.Typer()


@app.command(
    epilog="Example: symbiosis finetune chats.jsonl --out my-adapter --method lora --rank 8 --epochs 3\n\n"
    "By a server: symbiosis finetune chats.jsonl --hosted --suffix pirate --epochs 10"
)
def finetune(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.jsonl",
            help='A line per example: {"messages": [{"role", "content"} …]} or {"text": …}; '
            'hosted also {"prompt": …, "completion": …}.',
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FOLDER",
            show_default=False,
            help="Where the adapter is written, new or empty; a hosted one is copied there, if asked.",
        ),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            "--url",
            metavar="ADDRESS",
            show_default=False,
            help=f"Where the executor listens. (default: {DEFAULT_ADDRESS}; with --hosted {DEFAULT_SITE})",
        ),
    ] = None,
    token: Token = None,
    key: Key = None,
    name: Name = "finetune",
    hosted: Annotated[
        bool, typer.Option("--hosted", help="Let a server train it (`symbiosis serve --http`): nothing is computed here.")
    ] = False,
    validation: Annotated[
        Path | None, typer.Option("--validation", metavar="FILE", show_default=False, help="Data to test with. Hosted only.")
    ] = None,
    suffix: Annotated[str | None, typer.Option(show_default=False, help="Part of the adapter's name. Hosted only.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", show_default=False, help="A picture of the loss. Hosted only.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="lora, rslora, dora, ia3, prefix, prompt or ptuning; loha, lokr, vera and oft too, but not with --hosted."
        ),
    ] = "lora",
    rank: Annotated[int | None, typer.Option(show_default=False, help="Of the methods that have one. (default: 8)")] = None,
    alpha: Annotated[float | None, typer.Option(show_default=False, help="LoRA's scale. (default: 2 × rank)")] = None,
    targets: Annotated[
        str | None,
        typer.Option(show_default=False, help="Layers to adapt, as q_proj,v_proj or all-linear. (default: PEFT's choice)"),
    ] = None,
    virtual_tokens: Annotated[
        int | None, typer.Option("--virtual-tokens", show_default=False, help="Length of a prefix or prompt. (default: 16)")
    ] = None,
    lr: Annotated[float | None, typer.Option(show_default=False, help="(default: the method's own)")] = None,
    epochs: Annotated[float | None, typer.Option(show_default=False, help="A fraction too. (default: 3)")] = None,
    steps: Annotated[int | None, typer.Option(show_default=False, help="In place of epochs.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Examples per step. Hosted: by the data, unless given.")] = 4,
    max_length: Annotated[
        int,
        typer.Option(
            "--max-length",
            help="Tokens of an example beyond these are cut off. Hosted: 2048 or what the model takes, unless given.",
        ),
    ] = 512,
    seed: Annotated[int, typer.Option(help="Of the adapter's start and the order of examples.")] = 0,
) -> None:
    """Train an adapter on your chats or texts; the result is a plain PEFT folder.

    With --hosted a server trains and serves it, and what is not given is as the server has it.
    """
    if hosted:
        for option in ("token", "name"):
            if is_given(ctx, option):
                raise SymbiosisError(f"--{option} is for training through an executor: a server of --hosted knows you by --key")
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
            connect or DEFAULT_SITE,
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
            raise SymbiosisError(f"--{option} is for a server's training: give --hosted too")
    if out is None:
        raise SymbiosisError("say where the adapter is written: --out FOLDER")
    from symbiosis.app.executor import connect as connect_to
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
    samples = read_samples(data)  # before connecting: bad data shows at once
    check_out(out)
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


@contextmanager
def _training_bar() -> Iterator[Callable[[StepReport], None]]:
    """A live bar with loss and tokens/s; gives what to call after each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=err) as progress:
        task = progress.add_task("Training", total=None, figures="", visible=False)

        def on_step(step: StepReport) -> None:
            figures = f"loss {step.loss:.3f}  {step.tokens / max(step.seconds, 1e-9):,.0f} tokens/s"
            progress.update(task, completed=step.number, total=step.steps, figures=figures, visible=True)

        yield on_step
