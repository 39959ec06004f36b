"""The `symbiosis` command: reads options, calls launch and the tenants' tools.

torch takes seconds to import, so every command imports what it needs itself:
`symbiosis --help` answers at once.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from symbiosis import __version__, adapter_commands, job_commands
from symbiosis.adapter_commands import DEFAULT_SITE, Key
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from symbiosis.finetuning import Step
    from symbiosis.talk import Sampling

DEFAULT_ADDRESS = "tcp://127.0.0.1:7777"
DEFAULT_HTTP = "127.0.0.1:8000"
_SHORT_SECRET = 8
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


class _Serve(TyperCommand):
    """`--http` may stand alone: then it is the usual address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said: list[str] = []
        for word, following in zip(args, [*args[1:], ""], strict=True):
            said += [word] if word != "--http" or re.fullmatch(r"[^-].*:.*|\d+", following) else [word, DEFAULT_HTTP]
        return super().parse_args(ctx, said)


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

app.add_typer(adapter_commands.app)
app.add_typer(job_commands.app)

Connect = Annotated[str, typer.Option("--connect", metavar="ADDRESS", help="Where the executor listens.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="SECRET", envvar="SYMBIOSIS_TOKEN", show_default=False, help="Your token, if it asks for one."
    ),
]
Name = Annotated[str, typer.Option("--name", help="How you show in the figures without a token.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", metavar="FOLDER", show_default=False, help="A saved PEFT adapter to speak with.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token each time.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest answer.")]
Seed = Annotated[int | None, typer.Option("--seed", show_default=False, help="Makes sampling repeatable.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"symbiosis {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


# -- the provider ---------------------------------------------------------------------------


def read_adapters(given: list[str]) -> dict[str, Path]:
    """Names and folders from `NAME=FOLDER`."""
    adapters: dict[str, Path] = {}
    for entry in given:
        name, mark, folder = entry.partition("=")
        if not mark or not name or not folder:
            raise SymbiosisError(f"--adapter {entry}: expected NAME=FOLDER")
        if name in adapters:
            raise SymbiosisError(f"two adapters are named {name!r}: give each a name of its own")
        adapters[name] = Path(folder)
    return adapters


def read_tokens(given: list[str], environment: str, what: str = "token") -> dict[str, str]:
    """Tenants' names and secrets from `NAME=SECRET` or plain `SECRET`. Raises without repeating a secret."""
    tokens: dict[str, str] = {}
    plain = 0
    for entry in [*given, *(part.strip() for part in environment.split(",") if part.strip())]:
        name, mark, secret = entry.partition("=")
        if not mark:
            plain += 1
            name, secret = f"tenant-{plain}", entry
        if not name or not secret:
            raise SymbiosisError(f"a {what} must be NAME=SECRET or SECRET, neither empty")
        if name in tokens:
            raise SymbiosisError(f"two {what}s name the tenant {name!r}: give each tenant one")
        tokens[name] = secret
    return tokens


class _Stop:
    """Set by signals. One may come while another is handled (`make` passes them on), so no lock is taken."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __call__(self, *_: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._write, b".")

    def wait(self, seconds: float) -> bool:
        return bool(select.select([self._read], [], [], seconds)[0])


_FOR_HTTP = (
    *("key", "admin_key", "adapter", "adapter_root", "uploads", "tenant_adapters", "tenant_adapter_gb", "tenant_requests"),
    *("tenant_rate", "cache_gb", "adapter_gb", "adapter_host_gb", "max_rows", "max_running", "max_queued", "tenant_queued"),
    *("jobs", "running_jobs", "tenant_running_jobs"),
)


def _given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed; neither its default nor the environment's."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _limit(name: str, help: str, *, hidden: bool = False) -> Any:
    return typer.Option(name, min=0, help=help, show_default=not hidden, rich_help_panel="Limits of serving over HTTP")


@app.command(cls=_Serve, epilog="Example: symbiosis serve --listen tcp://127.0.0.1:7777 --listen shm://base --http")
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(show_default=False, help="Folder or hub id; none: the default model.")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen", metavar="ADDRESS", help=f"tcp://HOST:PORT or shm://NAME; repeatable. (default: {DEFAULT_ADDRESS})"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the base layers lie: cpu, cuda, cuda:1 …")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="float32, bfloat16 or float16; none: as the checkpoint says.")
    ] = None,
    policy: Annotated[str, typer.Option(help="How calls are batched: opportunistic, lockstep or none.")] = "opportunistic",
    max_wait_ms: Annotated[
        float | None, typer.Option("--max-wait-ms", show_default=False, help="Longest that a call is held to gather company.")
    ] = None,
    training_share: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Share for training while somebody decodes: of the time (default: 0.25; 0.1 beside HTTP on a CPU), "
            "or, beside HTTP on a GPU, of its multiprocessors (default: by --training-slowdown).",
        ),
    ] = None,
    training_slowdown: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="How many times as long a token may take while jobs train beside HTTP on a GPU (default: 1.3).",
        ),
    ] = None,
    token: Annotated[
        list[str] | None,
        typer.Option(
            "--token",
            metavar="NAME=SECRET",
            help="A tenant's token; repeatable. Also from SYMBIOSIS_TOKENS, comma-separated, which `ps` does not show.",
        ),
    ] = None,
    host_head: Annotated[bool, typer.Option("--host-head", help="Host the model's head too.")] = False,
    host_embeddings: Annotated[bool, typer.Option("--host-embeddings", help="Host the embeddings too.")] = False,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Never hand a base weight to a tenant.")] = False,
    no_direct: Annotated[
        bool, typer.Option("--no-direct", help="Let no tenant map the GPU's memory: calls only, for tenants you do not trust.")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="[HOST:PORT]",
            show_default=False,
            help=f"Serve OpenAI's API too, on the same weights. (alone: at {DEFAULT_HTTP})",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="NAME=SECRET",
            help="A tenant's key for HTTP; repeatable. Also from SYMBIOSIS_KEYS.",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key",
            metavar="SECRET",
            envvar="SYMBIOSIS_ADMIN_KEY",
            show_default=False,
            help="For /metrics and to load and unload adapters.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="A PEFT adapter to serve over HTTP; repeatable."),
    ] = None,
    adapter_root: Annotated[
        Path | None,
        typer.Option(
            "--adapter-root",
            metavar="FOLDER",
            show_default=False,
            help="Where the admin may load adapters from while serving; none: from nowhere.",
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(
            "--uploads",
            metavar="FOLDER",
            show_default=False,
            help="Keeps the adapters that tenants upload, also for the next server; none: they go when this one does.",
        ),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            "--jobs",
            metavar="FOLDER",
            show_default=False,
            help="Keeps fine-tuning jobs, which go on after a restart. (default: UPLOADS-jobs, beside --uploads)",
        ),
    ] = None,
    running_jobs: Annotated[int, _limit("--running-jobs", "Most fine-tuning jobs at once; others wait.")] = 8,
    tenant_running_jobs: Annotated[int, _limit("--tenant-running-jobs", "Most of one tenant at once.")] = 4,
    tenant_adapters: Annotated[int, _limit("--tenant-adapters", "Most adapters that one tenant may upload.")] = 64,
    tenant_adapter_gb: Annotated[float, _limit("--tenant-adapter-gb", "Most gigabytes that they may have together.")] = 4.0,
    tenant_requests: Annotated[
        int | None, _limit("--tenant-requests", "Most requests of one tenant at once. (default: no limit)", hidden=True)
    ] = None,
    tenant_rate: Annotated[
        int | None, _limit("--tenant-rate", "Most requests of one tenant in a minute. (default: no limit)", hidden=True)
    ] = None,
    cache_gb: Annotated[
        float | None, _limit("--cache-gb", "Memory for keys and values. (default: 1024 pages of 16 tokens)", hidden=True)
    ] = None,
    adapter_gb: Annotated[float, _limit("--adapter-gb", "Memory for adapters on the device; more are served than fit.")] = 2.0,
    adapter_host_gb: Annotated[
        float, _limit("--adapter-host-gb", "Memory of the host for adapters ready to be copied to a GPU.")
    ] = 4.0,
    max_rows: Annotated[int, _limit("--max-rows", "Most tokens that one pass computes.")] = 2048,
    max_running: Annotated[int, _limit("--max-running", "Most answers that are computed at once.")] = 256,
    max_queued: Annotated[int, _limit("--max-queued", "Most answers that wait; who asks for more gets a 429.")] = 4096,
    tenant_queued: Annotated[int, _limit("--tenant-queued", "Most answers of one tenant that wait.")] = 1024,
) -> None:
    """Hold one base model and serve its layers to tenants, until Ctrl-C."""
    keys = read_tokens(key or [], os.environ.get("SYMBIOSIS_KEYS", ""), "key")
    adapters = read_adapters(adapter or [])
    for_http = [name for name in _FOR_HTTP if _given(ctx, name)]
    if http is None and for_http:
        raise SymbiosisError(f"--{for_http[0].replace('_', '-')} is for HTTP: give --http too")
    tokens = read_tokens(token or [], os.environ.get("SYMBIOSIS_TOKENS", ""))
    secrets = [*(("token", *each) for each in tokens.items()), *(("key", *each) for each in keys.items())]
    secrets += [("key", "the admin", admin_key)] if admin_key else []
    for what, name in ((what, name) for what, name, secret in secrets if len(secret) < _SHORT_SECRET):
        err.print(f"the {what} of {name} is short enough to guess: `openssl rand -hex 16` makes a good one")
    with err.status("Starting"):
        from symbiosis.engine.residency import ResidencyConfig
        from symbiosis.hosting import check_http
        from symbiosis.jobs.queue import JobLimits
        from symbiosis.launch import Executor, check_address
        from symbiosis.server.limits import RequestLimits
        from symbiosis.server.store import StoreLimits

        if http is not None:
            check_http(http, keys)
        for address in listen or [DEFAULT_ADDRESS]:
            check_address(address, tokens)  # before a big model is loaded for nothing
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err) as progress:
        task = progress.add_task("Splitting", total=None, visible=False)
        executor = Executor(
            model,
            device,
            dtype,
            policy,
            tokens=tokens,
            host_head=host_head,
            host_embeddings=host_embeddings,
            weights=not no_weights,
            direct=not no_direct,
            max_wait_ms=max_wait_ms,
            training_share=training_share,
            training_slowdown=training_slowdown,
            hosting=http is not None,
            progress=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
        )
    with executor, ExitStack() as stack:
        stopped = _Stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stopped)
        hosting = None
        if http is not None:
            hosting = stack.enter_context(
                executor.host(
                    http,
                    keys=keys,
                    admin_key=admin_key,
                    adapters=adapters,
                    adapter_root=adapter_root,
                    uploads=uploads,
                    jobs=jobs,
                    job_limits=JobLimits(running=running_jobs, tenant_running=tenant_running_jobs),
                    store_limits=StoreLimits(adapters=tenant_adapters, bytes=int(tenant_adapter_gb * 1e9)),
                    requests=RequestLimits(at_once=tenant_requests, per_minute=tenant_rate),
                    cache_bytes=None if cache_gb is None else int(cache_gb * 1e9),
                    residency=ResidencyConfig(device_bytes=int(adapter_gb * 1e9), host_bytes=int(adapter_host_gb * 1e9)),
                    max_rows=max_rows,
                    max_running=max_running,
                    max_queued=max_queued,
                    tenant_queued=min(tenant_queued, max_queued),
                )
            )
        addresses = [executor.listen(address) for address in listen or [DEFAULT_ADDRESS]]
        typer.echo(f"{executor.stats()['model']}: {executor.split.summary()}")
        secret = ', token="…"' if tokens else ""
        typer.echo(
            "\nA tenant types:\n"
            "  import symbiosis\n"
            f'  model = symbiosis.connect("{addresses[0]}"{secret})\n'
            "  tokenizer = model.symbiosis.tokenizer()\n"
            '  print(tokenizer.decode(model.generate(**tokenizer("Hello", return_tensors="pt"))[0]))\n'
        )
        for address in addresses:
            typer.echo(f"listening at {address}")
        if hosting is not None:
            typer.echo(f"listening at {hosting.url}")
            _say_what_goes(uploads, jobs)
        sys.stdout.flush()  # scripts wait for these lines
        while not stopped.wait(1.0):
            if not executor.is_serving():
                raise SymbiosisError("the executor's loop has failed, as the log above says")
            if hosting is not None:
                hosting.check()
        err.print("stopping")


def _say_what_goes(uploads: Path | None, jobs: Path | None) -> None:
    """Of what tenants bring."""
    if uploads is None:
        what = "uploaded and trained adapters" + (", files and fine-tuning jobs" if jobs is None else "")
        err.print(f"{what} go when this server does: --uploads FOLDER keeps them", soft_wrap=True, highlight=False)


# -- tenants --------------------------------------------------------------------------------


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines() -> Iterator[str]:
    """What the user says: a prompt at a terminal, plain lines otherwise."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # gives input() a history and line editing

    err.print("[dim]/exit or Ctrl-D ends the talk[/dim]")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _sampling(max_new_tokens: int, temperature: float) -> Sampling:
    from symbiosis.talk import Sampling

    return Sampling(max_new_tokens=max_new_tokens, temperature=temperature)


@app.command(epilog="Example: symbiosis chat --adapter pirate --system 'Answer in one sentence.'")
def chat(
    ctx: typer.Context,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="ADDRESS",
            show_default=False,
            help=f"Where the executor listens, or a server's http://HOST:PORT. (default: {DEFAULT_ADDRESS}; {DEFAULT_SITE} if "
            "--adapter is a name)",
        ),
    ] = None,
    token: Token = None,
    key: Key = None,
    name: Name = "chat",
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="NAME",
            show_default=False,
            help="An adapter of the server; or, with an executor, the folder of one of your own.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(show_default=False, help="What the model is told first.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.2,
    seed: Seed = None,
) -> None:
    """Talk with the model. Lines come from the terminal, or from a pipe.

    A server (`symbiosis serve --http`) computes everything and has the adapters; with an executor,
    attention and your adapter are computed here.
    """
    from symbiosis import talk

    sampling = _sampling(max_new_tokens, temperature)
    if connect is None:
        connect = DEFAULT_ADDRESS if adapter is None or Path(adapter).is_dir() else DEFAULT_SITE
    over_http = connect.startswith(("http://", "https://"))
    if _given(ctx, "token" if over_http else "key"):
        raise SymbiosisError(f"{connect} takes {'--key, not --token' if over_http else '--token, not --key'}")
    if over_http:
        from symbiosis.site import Site

        talk.chat(talk.SiteSpeaker(Site(connect, key), adapter, seed), _lines(), sampling, _write, system)
        return
    from symbiosis import chatting

    folder = None if adapter is None else Path(adapter)
    with chatting.speaker(connect, token=token, name=name, adapter=folder, seed=seed) as speaker:
        talk.chat(speaker, _lines(), sampling, _write, system)


@app.command(epilog="Example: symbiosis generate 'Why is the sky blue?' --max-new-tokens 60")
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Each is answered by itself.")],
    connect: Connect = DEFAULT_ADDRESS,
    token: Token = None,
    name: Name = "generate",
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, with no chat template.")] = False,
) -> None:
    """Answer prompts and exit. The text goes to stdout, nothing else does."""
    from symbiosis import chatting

    sampling = _sampling(max_new_tokens, temperature)
    with chatting.speaker(connect, token=token, name=name, adapter=adapter, seed=seed) as speaker:
        for prompt in prompts:
            if raw:
                speaker.complete(prompt, sampling, _write)
            else:
                speaker.answer([{"role": "user", "content": prompt}], sampling, _write)
            _write("\n")


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
            help="Where the adapter is written; a hosted one is copied there, if asked.",
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
    epochs: Annotated[int | None, typer.Option(show_default=False, help="(default: 3)")] = None,
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
        hyperparameters = {
            "peft_method": method,
            "rank": rank,
            "alpha": alpha,
            "targets": None if targets is None else "all-linear" if targets == "all-linear" else targets.split(","),
            "virtual_tokens": virtual_tokens,
            "learning_rate": lr,
            "n_epochs": epochs,
            "n_steps": steps,
            "batch_size": batch_size if _given(ctx, "batch_size") else None,
            "max_length": max_length if _given(ctx, "max_length") else None,
        }
        job_commands.finetune(
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
        if _given(ctx, option):
            raise SymbiosisError(f"--{option} is for a server's training: give --hosted too")
    if out is None:
        raise SymbiosisError("say where the adapter is written: --out FOLDER")
    from symbiosis.finetuning import FinetuneConfig, read_samples
    from symbiosis.finetuning import finetune as train
    from symbiosis.launch import connect as connect_to

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
def _training_bar() -> Iterator[Callable[[Step], None]]:
    """A live bar with loss and tokens/s; gives what to call after each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=err) as progress:
        task = progress.add_task("Training", total=None, figures="", visible=False)

        def on_step(step: Step) -> None:
            figures = f"loss {step.loss:.3f}  {step.tokens / max(step.seconds, 1e-9):,.0f} tokens/s"
            progress.update(task, completed=step.number, total=step.steps, figures=figures, visible=True)

        yield on_step


@app.command(epilog="Example: symbiosis top --interval 2")
def top(
    connect: Connect = DEFAULT_ADDRESS,
    token: Token = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table (rates since the start) and exit.")] = False,
) -> None:
    """Watch an executor: tenants, batches, tokens/s, memory. Ctrl-C ends it.

    Where tenants have tokens, each sees itself; the token named `provider` sees all.
    """
    from symbiosis.launch import fetch_stats

    stats = fetch_stats(connect, token=token)
    if once:
        Console().print(figures_table(stats, None))
        return
    with suppress(KeyboardInterrupt), Live(figures_table(stats, None), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, stats = stats, fetch_stats(connect, token=token)
            live.update(figures_table(stats, before), refresh=True)


def figures_table(stats: dict[str, Any], before: dict[str, Any] | None) -> Table:
    """An executor's figures; rates are since `before`, or since its start."""
    seconds = max(1e-9, stats["uptime_s"] - (before["uptime_s"] if before else 0.0))
    old = before["tenants"] if before else {}
    table = Table(
        title=f"{escape(Path(stats['model']).name)} · {stats['policy']} · up {stats['uptime_s']:,.0f} s · "
        f"{stats['bytes_held'] / 1e6:,.0f} MB held",
        caption=f"{stats['calls']:,} calls in {stats['batches']:,} batches, mean batch {stats['mean_batch']:.2f}, "
        f"{stats['mean_rows']:,.0f} rows each · {stats['queued']} queued · "
        f"busy {100 * stats['busy_s'] / max(1e-9, stats['uptime_s']):.0f} %",
    )
    table.add_column("tenant")
    for column in ("sessions", "calls", "tokens", "tokens/s", "training rows", "mean wait", "errors"):
        table.add_column(column, justify="right")
    for tenant, figures in sorted(stats["tenants"].items()):
        if tenant == "top" and not figures["calls"]:
            continue  # that is us, looking
        rate = (figures["tokens"] - old.get(tenant, {}).get("tokens", 0)) / seconds
        table.add_row(
            escape(tenant),
            f"{figures['sessions']}",
            f"{figures['calls']:,}",
            f"{figures['tokens']:,}",
            f"{rate:,.1f}",
            f"{figures['training_rows']:,}",
            f"{figures['mean_wait_ms']:.2f} ms",
            f"{figures['errors']}",
        )
    return table


@app.command(epilog="Example: symbiosis demo --out demo-out --steps 28")
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where adapters, figures and the plot go.")] = Path(
        "demo-out"
    ),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each tenant.")] = 28,
) -> None:
    """Three tenants fine-tune at once on the default model (LoRA, IA3, prefix tuning) while a fourth chats."""
    from symbiosis.demo import run_demo

    if not run_demo(out, steps, Console()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
