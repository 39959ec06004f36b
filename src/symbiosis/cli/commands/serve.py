"""`symbiosis serve`."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from typer.core import TyperCommand

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, ShutdownDelay, is_given
from symbiosis.cli.commands.serve_inputs import Stop, read_adapters, read_names, read_tokens
from symbiosis.cli.commands.serve_zoo import HostedZoo, check_zoo_options
from symbiosis.common import file_limits
from symbiosis.errors import SymbiosisError

DEFAULT_HTTP = "127.0.0.1:8000"
_SHORT_SECRET = 8
_FOR_HTTP = (
    *("key", "admin_key", "adapter", "adapter_root", "uploads", "tenant_adapters", "tenant_adapter_gb", "tenant_requests"),
    *(
        "tenant_rate",
        "cache_gb",
        "host_cache_gb",
        "adapter_gb",
        "adapter_host_gb",
        "max_rows",
        "max_running",
        "max_queued",
        "tenant_queued",
    ),
    *("http_workers", "jobs", "running_jobs", "tenant_running_jobs", "cors_origin", "temperature", "shutdown_delay"),
)
err = Console(stderr=True)

app = typer.Typer()


class _Serve(TyperCommand):
    """`--http` without a value means the default address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        expanded: list[str] = []
        for word, following in itertools.zip_longest(args, args[1:], fillvalue=""):
            expanded += [word] if word != "--http" or re.fullmatch(r"[^-].*:.*|:?\d[\d.]*", following) else [word, DEFAULT_HTTP]
        return super().parse_args(ctx, expanded)


def _limit(name: str, help: str, *, hidden: bool = False) -> Any:
    return typer.Option(name, min=0, help=help, show_default=not hidden, rich_help_panel="Limits of serving over HTTP")


@app.command(
    cls=_Serve,
    epilog="Example: symbiosis serve --listen tcp://127.0.0.1:7777 --http   Of a zoo: symbiosis serve --zoo ./zoo",
)
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(show_default=False, help="Folder or hub id; none: the default model.")] = None,
    zoo: Annotated[
        Path | None,
        typer.Option(
            "--zoo",
            metavar="FOLDER",
            show_default=False,
            help="Instead of MODEL: serve all models of a zoo (`symbiosis zoo`) over HTTP, by name. What they share is in "
            "memory and computed once.",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="NAME,NAME",
            show_default=False,
            help="Of the zoo, only these; the first is the default. (default: all; the first one added)",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen", metavar="ADDRESS", help=f"tcp://HOST:PORT or shm://NAME; repeatable. (default: {DEFAULT_ADDRESS})"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the base layers: cpu, cuda, cuda:1 …")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="float32, bfloat16 or float16; none: that of the checkpoint.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Batching policy: opportunistic, lockstep or none.")] = "opportunistic",
    max_wait_ms: Annotated[
        float | None,
        typer.Option("--max-wait-ms", show_default=False, help="Longest time a call is held to be batched with others."),
    ] = None,
    training_share: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Share that training gets while other sessions decode. Of the time: by default 0.25, or 0.1 with --http on a "
            "CPU. With --http on a GPU: of its multiprocessors, by default as many as keep to --training-slowdown.",
        ),
    ] = None,
    training_slowdown: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Allowed slowdown of decoding while jobs train on the same GPU (default: 1.3).",
        ),
    ] = None,
    token: Annotated[
        list[str] | None,
        typer.Option(
            "--token",
            metavar="[NAME=]SECRET",
            help="A tenant's token, or SECRET alone for a tenant named tenant-1, tenant-2 …; repeatable. Also from "
            "SYMBIOSIS_TOKENS, comma-separated, which `ps` does not show.",
        ),
    ] = None,
    host_head: Annotated[bool, typer.Option("--host-head", help="Host the LM head too.")] = False,
    host_embeddings: Annotated[bool, typer.Option("--host-embeddings", help="Host the embeddings too.")] = False,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Never send a base weight to a tenant.")] = False,
    no_direct: Annotated[
        bool, typer.Option("--no-direct", help="Do not let tenants map GPU memory: layer calls only, for untrusted tenants.")
    ] = False,
    shards: Annotated[
        int | None,
        typer.Option(
            show_default=False,
            help="Divide the base layers among so many processes, on the GPUs of this machine or its CPU; each listens, at "
            "ports that follow each other. Under torchrun: the number of its processes, on any hosts.",
        ),
    ] = None,
    sharding: Annotated[
        str,
        typer.Option(
            help="How shards compute a call: tensor (each its part), parameters (one gathers the weight), "
            "auto: the faster for its size."
        ),
    ] = "auto",
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="[HOST:PORT]",
            show_default=False,
            help=f"Serve OpenAI's API on the same weights. (without a value: {DEFAULT_HTTP})",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="[NAME=]SECRET",
            help="A tenant's key for HTTP, or SECRET alone for a tenant named tenant-1, tenant-2 …; repeatable. Also from "
            "SYMBIOSIS_KEYS.",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key",
            metavar="SECRET",
            envvar="SYMBIOSIS_ADMIN_KEY",
            show_default=False,
            help="For statistics (/metrics, /v1/statistics) and to load and unload adapters.",
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
            help="Folder from which the admin may load adapters while serving; none: not allowed.",
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(
            "--uploads",
            metavar="FOLDER",
            show_default=False,
            help="Persists uploaded adapters; without it they are lost when the server stops.",
        ),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            "--jobs",
            metavar="FOLDER",
            show_default=False,
            help="Persists fine-tuning jobs, which resume after a restart. (default: UPLOADS-jobs, next to --uploads)",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Origin whose web pages may use HTTP, such as https://app.example, or '*' with keys; repeatable.",
        ),
    ] = None,
    running_jobs: Annotated[int, _limit("--running-jobs", "Most fine-tuning jobs running at once; others are queued.")] = 8,
    tenant_running_jobs: Annotated[int, _limit("--tenant-running-jobs", "Most running jobs of one tenant.")] = 4,
    tenant_adapters: Annotated[
        int, _limit("--tenant-adapters", "Most adapters of one tenant, including those of its jobs.")
    ] = 64,
    tenant_adapter_gb: Annotated[float, _limit("--tenant-adapter-gb", "Most gigabytes of adapters of one tenant.")] = 4.0,
    tenant_requests: Annotated[
        int | None, _limit("--tenant-requests", "Most requests of one tenant at once. (default: no limit)", hidden=True)
    ] = None,
    tenant_rate: Annotated[
        int | None, _limit("--tenant-rate", "Most requests of one tenant in a minute. (default: no limit)", hidden=True)
    ] = None,
    cache_gb: Annotated[
        float | None, _limit("--cache-gb", "Memory of the KV cache. (default: 1024 blocks of 16 tokens)", hidden=True)
    ] = None,
    host_cache_gb: Annotated[
        float, _limit("--host-cache-gb", "Host memory for KV cache blocks that do not fit: restored, not recomputed.")
    ] = 0.0,
    adapter_gb: Annotated[
        float, _limit("--adapter-gb", "Device memory of the adapter cache; adapters beyond it are loaded on demand.")
    ] = 2.0,
    adapter_host_gb: Annotated[
        float, _limit("--adapter-host-gb", "Host memory for adapters ready to be copied to a GPU.")
    ] = 4.0,
    max_rows: Annotated[int, _limit("--max-rows", "Most tokens in one step.")] = 2048,
    http_workers: Annotated[
        int | None,
        typer.Option(show_default=False, min=1, max=64, help="Processes for completions; none: 1 on a CPU, up to 4 on a GPU."),
    ] = None,
    max_running: Annotated[int, _limit("--max-running", "Most sequences running at once.")] = 512,
    temperature: Annotated[
        float | None,
        _limit(
            "--temperature",
            "Of requests that name none. (default: that of the model's generation config, else 1; the default model: 0)",
            hidden=True,
        ),
    ] = None,
    max_queued: Annotated[int, _limit("--max-queued", "Most queued sequences; requests beyond it get a 429.")] = 4096,
    tenant_queued: Annotated[int, _limit("--tenant-queued", "Most queued sequences of one tenant.")] = 1024,
    shutdown_delay: ShutdownDelay = 0.0,
) -> None:
    """Load one base model, or the models of a zoo, and serve to tenants until Ctrl-C."""
    if zoo is not None:
        check_zoo_options(model, shards)
        http = DEFAULT_HTTP if http is None else http
    elif models is not None:
        raise SymbiosisError("--models names models of a zoo: add --zoo FOLDER")
    names = None if models is None else read_names(models, "--models")
    keys = read_tokens(key or [], os.environ.get("SYMBIOSIS_KEYS", ""), "key")
    adapters = read_adapters(adapter or [])
    for_http = [name for name in _FOR_HTTP if is_given(ctx, name)]
    if http is None and for_http:
        raise SymbiosisError(f"--{for_http[0].replace('_', '-')} applies to HTTP: add --http")
    tokens = read_tokens(token or [], os.environ.get("SYMBIOSIS_TOKENS", ""))
    secrets = [*(("token", *each) for each in tokens.items()), *(("key", *each) for each in keys.items())]
    secrets += [("key", "the admin", admin_key)] if admin_key else []
    for what, name in ((what, name) for what, name, secret in secrets if len(secret) < _SHORT_SECRET):
        err.print(f"the {what} of {name} is short and can be guessed: use `openssl rand -hex 16`")
    with err.status("Starting"):
        from symbiosis.models import blob_store  # the first checks need no torch, whose import takes seconds
        from symbiosis.models.device_names import check_driver
        from symbiosis.models.model_source import check_found, is_default

        if http is not None:
            from symbiosis.cli.provider_folders import check_provider_folders
            from symbiosis.server.settings import check_cors_origins

            check_cors_origins(cors_origin or [], keys)
            check_provider_folders(uploads=uploads, jobs=jobs, adapters=adapters, adapter_root=adapter_root)
        blob_store.check_writable()
        if shards is None or device in ("cpu", "cuda"):  # another device of shards is wrong everywhere
            check_driver(device)
        if model is not None and not is_default(model):
            check_found(model)
        if is_given(ctx, "sharding") and shards is None:
            raise SymbiosisError("--sharding applies to shards: add --shards N")

        from symbiosis.app.executor import Executor, check_address, check_sharding
        from symbiosis.app.front_door import check_http
        from symbiosis.app.shard_processes import ShardProcesses, device_of_shard, listen_address, rank_of_shard
        from symbiosis.jobs.queue import JobLimits
        from symbiosis.models.device_dtype import resolve_device, resolve_dtype
        from symbiosis.planning.memory_check import check_server
        from symbiosis.planning.model_size import ModelSize
        from symbiosis.server.adapter_store import StoreLimits
        from symbiosis.server.rate_limits import RequestLimits
        from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig

        if http is not None:
            check_http(http, keys)
        listen = listen or [DEFAULT_ADDRESS]
        rank = rank_of_shard() if shards is not None else 0
        listen = [listen_address(address, rank) for address in listen]
        place = None
        if shards is not None:
            place = device_of_shard(device, shards, rank)
            check_sharding(sharding)
        for address in listen:
            check_address(address, tokens)  # before the model is loaded
        cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)
        if zoo is None:
            check_server(
                ModelSize.of(model, resolve_dtype(dtype)),
                resolve_device(device) if place is None else place,
                hosting=http is not None,
                shards=shards or 1,
                cache_bytes=cache_bytes,
                adapter_bytes=int(adapter_gb * 1e9),
            )
    file_limits.raise_open_file_limit()  # every channel uses two file descriptors
    with ExitStack() as stack:
        mesh, processes = None, None
        hosted = HostedZoo.open(stack, zoo, names, device, dtype, cache_bytes, err)
        if shards is not None and place is not None:
            processes = stack.enter_context(ShardProcesses(shards, sys.argv[1:]))
            mesh = processes.join(place)
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err, disable=rank > 0
        ) as progress:
            task = progress.add_task("Splitting", total=None, visible=False)
            executor = Executor(
                model if hosted is None else hosted.model,
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
                tokenizer=None if hosted is None else hosted.tokenizer,
                hosting=http is not None,
                shards=mesh,
                sharding=sharding,
                progress=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
            )
        stack.enter_context(executor)
        stopped = Stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stopped)
        hosting = None
        if http is not None and rank:
            executor.follow()
        elif http is not None:
            hosting = stack.enter_context(
                executor.host(
                    http,
                    keys=keys,
                    admin_key=admin_key,
                    adapters=adapters if hosted is None else hosted.add_adapters(adapters),
                    adapter_root=adapter_root,
                    uploads=uploads,
                    jobs=jobs,
                    job_limits=JobLimits(running=running_jobs, tenant_running=tenant_running_jobs),
                    store_limits=StoreLimits(adapters=tenant_adapters, bytes=int(tenant_adapter_gb * 1e9)),
                    requests=RequestLimits(at_once=tenant_requests, per_minute=tenant_rate),
                    cors_origins=cors_origin or (),
                    shutdown_delay_s=shutdown_delay,
                    temperature=temperature,
                    cache_bytes=cache_bytes,
                    host_cache_bytes=int(host_cache_gb * 1e9),
                    residency=AdapterCacheConfig(device_bytes=int(adapter_gb * 1e9), host_bytes=int(adapter_host_gb * 1e9)),
                    workers=http_workers,
                    max_rows=max_rows,
                    max_running=max_running,
                    max_queued=max_queued,
                    tenant_queued=min(tenant_queued, max_queued),
                    **({} if hosted is None else hosted.options),
                )
            )
        addresses = [executor.listen(address) for address in listen]
        if rank == 0:
            typer.echo(f"{executor.stats()['model']}: {executor.split.summary()}")
            for line in () if hosted is None else hosted.summary():
                typer.echo(line)
            _explain(addresses[0], is_secret=bool(tokens))
        for address in addresses:
            typer.echo(f"listening at {address}")
        if hosting is not None:
            typer.echo(f"listening at {hosting.url}")
            _warn_not_persisted(uploads, jobs)
            _warn_not_compiled(device)
        sys.stdout.flush()  # scripts read these lines
        while not stopped.wait(1.0):
            if not executor.is_serving():
                raise SymbiosisError("the executor's loop has failed: see the log above")
            if hosting is not None:
                hosting.check()
            if processes is not None:
                processes.check()
        if rank == 0:
            err.print("stopping")


def _explain(address: str, *, is_secret: bool) -> None:
    secret = ', token="…"' if is_secret else ""
    typer.echo(
        "\nA tenant types:\n"
        "  import symbiosis\n"
        f'  model = symbiosis.connect("{address}"{secret})\n'
        "  tokenizer = model.symbiosis.tokenizer()\n"
        '  print(tokenizer.decode(model.generate(**tokenizer("Hello", return_tensors="pt"))[0]))\n'
    )


def _warn_not_persisted(uploads: Path | None, jobs: Path | None) -> None:
    if uploads is None:
        what = "uploaded and trained adapters" + (", files and fine-tuning jobs" if jobs is None else "")
        err.print(f"{what} are lost when this server stops: --uploads FOLDER persists them", soft_wrap=True, highlight=False)


def _warn_not_compiled(device: str) -> None:
    from symbiosis.kernels.cpu.library import is_compiled

    if device == "cpu" and not is_compiled():
        what = "the CPU kernels are not compiled, so decoding is slower: reinstall with a C compiler"
        err.print(what, soft_wrap=True, highlight=False)
