"""`symbiosis cluster …`: many engines behind one front door."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from symbiosis.cli.commands.engine_options import (
    AdapterGb,
    AdapterHostGb,
    CacheGb,
    Device,
    Dtype,
    Gpus,
    HostCacheGb,
    MaxRows,
    MaxRunning,
    ModelOption,
    NoTraining,
    StoreCacheGb,
    Threads,
    choose_launcher,
    engine_config,
)
from symbiosis.cli.commands.options import DEFAULT_URL, Key, ReadyFile, ShutdownDelay
from symbiosis.cli.commands.serve import DEFAULT_HTTP
from symbiosis.cli.commands.serve_inputs import Stop, read_adapters, read_tokens
from symbiosis.cli.views.cluster_view import print_cluster
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symbiosis.app.cluster.engine_launcher import EngineLauncher

_CHECK_S = 0.25
_LIMITS = "Limits of serving over HTTP"
err = Console(stderr=True)

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Many engines behind one HTTP address: up, join, status, drain, down.\n\n"
    "[bold]up[/bold] starts a director, engines and the front door on this host. Hosts add engines with "
    "[bold]join[/bold]. An engine that dies is replaced, and its requests go on at another one.",
    epilog="Example: symbiosis cluster up MODEL --engines 2",
)
Model = Annotated[str | None, typer.Argument(show_default=False, help="Folder or hub id; none: the default model.")]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="FOLDER",
        show_default=False,
        help="Secret, adapters and uploads of the cluster. (default: ~/.local/state/symbiosis/cluster)",
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        show_default=False,
        help="The cluster's secret; `up` creates it, for its owner only. (default: secret, in the folder of --state)",
    ),
]


def _limit(name: str, help: str, *, hidden: bool = False) -> Any:
    return typer.Option(name, min=0, help=help, show_default=not hidden, rich_help_panel=_LIMITS)


@app.command(
    epilog="Examples: symbiosis cluster up MODEL --engines 2   "
    "symbiosis cluster up MODEL --host 10.0.0.1 --engines 4 --max-engines 16 --device cuda --key ann=SECRET --http 0.0.0.0:8000"
)
def up(
    model: Model = None,
    engines: Annotated[int, typer.Option("--engines", min=1, max=4096, help="Engines at the start, and the fewest.")] = 1,
    max_engines: Annotated[
        int | None,
        typer.Option(
            "--max-engines", min=1, max=4096, show_default=False, help="Most engines under load. (default: --engines)"
        ),
    ] = None,
    here: Annotated[
        int | None,
        typer.Option(
            "--here",
            min=0,
            show_default=False,
            help="Most engines on this host, with Ray; 0: all on hosts that join. (default: all)",
        ),
    ] = None,
    http: Annotated[str, typer.Option("--http", metavar="HOST:PORT", help="Where OpenAI's API is served.")] = DEFAULT_HTTP,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="ray|processes",
            show_default=False,
            help="What keeps engines running. With Ray they may also be on hosts that join. (default: ray if it is installed)",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="IP", help="Where director and engines listen; an address that other hosts reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the director; 0: any.")] = 7778,
    secret_file: SecretFile = None,
    state: State = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            show_default=False,
            help="Step times of an engine (`symbiosis profile`), for the policy.",
        ),
    ] = None,
    ttft: Annotated[
        float, typer.Option("--ttft", metavar="SECONDS", min=0.001, help="Objective for the first token, with --profile.")
    ] = 2.0,
    tpot: Annotated[
        float, typer.Option("--tpot", metavar="SECONDS", min=0.001, help="Objective for each later token, with --profile.")
    ] = 0.1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            show_default=False,
            help="Use the Ray cluster that this host is a node of. Its nodes need the secret file at the same path.",
        ),
    ] = None,
    ray_port: Annotated[int, typer.Option("--ray-port", min=0, max=65535, help="Of the Ray head; 0: any.")] = 0,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="NAME=SECRET", help="A tenant's key for HTTP; repeatable. Also from SYMBIOSIS_KEYS."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key",
            metavar="SECRET",
            envvar="SYMBIOSIS_ADMIN_KEY",
            show_default=False,
            help="For statistics and to load and unload adapters.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="NAME=FOLDER", help="A PEFT adapter to serve; repeatable. All engines read the folder."
        ),
    ] = None,
    adapter_root: Annotated[
        Path | None,
        typer.Option(
            "--adapter-root", metavar="FOLDER", show_default=False, help="Folder that the admin may load adapters from."
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(
            "--uploads",
            metavar="FOLDER",
            show_default=False,
            help="Uploaded adapters and jobs; without --store, engines elsewhere use it too. (default: in that of --state)",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            show_default=False,
            help="Adapters, data sets and checkpoints for engines on any host: a folder that all hosts have, or "
            "s3://BUCKET/PREFIX with credentials from each host's environment. (default: engines use the folder of --uploads)",
        ),
    ] = None,
    store_cache_gb: StoreCacheGb = 20.0,
    http_workers: Annotated[
        int | None,
        typer.Option(
            "--http-workers",
            min=1,
            max=64,
            show_default=False,
            help="Processes for completions; none: 1 for engines on CPUs, up to 4 for engines on GPUs.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, _limit("--temperature", "Of requests that name none. (default: that of the model)", hidden=True)
    ] = None,
    running_jobs: Annotated[int, _limit("--running-jobs", "Most fine-tuning jobs running at once; others are queued.")] = 8,
    tenant_requests: Annotated[
        int | None, _limit("--tenant-requests", "Most requests of one tenant at once. (default: no limit)", hidden=True)
    ] = None,
    tenant_rate: Annotated[
        int | None, _limit("--tenant-rate", "Most requests of one tenant in a minute. (default: no limit)", hidden=True)
    ] = None,
    shutdown_delay: ShutdownDelay = 0.0,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: Threads = None,
    gpus: Gpus = None,
    no_training: NoTraining = False,
    cache_gb: CacheGb = None,
    host_cache_gb: HostCacheGb = 0.0,
    adapter_gb: AdapterGb = 2.0,
    adapter_host_gb: AdapterHostGb = 4.0,
    max_rows: MaxRows = 2048,
    max_running: MaxRunning = 512,
) -> None:
    """Start a cluster on this host and run it until Ctrl-C, or until `symbiosis cluster down`."""
    if max_engines is not None and max_engines < engines:
        raise SymbiosisError(f"--max-engines {max_engines} is less than --engines {engines}")
    keys, adapters = read_tokens(key or [], os.environ.get("SYMBIOSIS_KEYS", ""), "key"), read_adapters(adapter or [])
    launcher = choose_launcher(launcher)
    if launcher != "ray" and (ray_address is not None or ray_port or here is not None):
        raise SymbiosisError("--here, --ray-address and --ray-port apply to Ray: add --launcher ray")
    engine = engine_config(
        model, device, dtype, threads, no_training, cache_gb, host_cache_gb, adapter_gb, adapter_host_gb, max_rows, max_running
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with err.status("Starting"):
        from symbiosis.app.cluster.cluster_host import ClusterHost
        from symbiosis.app.cluster.engine_launcher import EngineProcesses
        from symbiosis.app.cluster.secret_file import read_or_create_secret
        from symbiosis.app.cluster.state_folder import StateFolder, default_state_folder
        from symbiosis.app.front_door import check_http, default_workers
        from symbiosis.cli.provider_folders import check_provider_folders
        from symbiosis.cluster.policies.objective import Objective
        from symbiosis.cluster.step_cost import read_step_cost
        from symbiosis.jobs.queue import JobLimits
        from symbiosis.models import blob_store
        from symbiosis.models.device_dtype import resolve_dtype
        from symbiosis.planning.model_size import ModelSize
        from symbiosis.server.rate_limits import RequestLimits
        from symbiosis.store.store_url import resolve_url

        state = state or default_state_folder()
        secret_file = secret_file or state / "secret"
        if profile is not None:
            read_step_cost(str(profile))
        check_http(http, keys)
        blob_store.check_writable()
        ModelSize.of(model, resolve_dtype(dtype))  # it can be loaded
    with StateFolder(state) as folder:
        secret = read_or_create_secret(secret_file)
        uploads = uploads or state / "uploads"
        check_provider_folders(uploads=uploads, jobs=None, adapters=adapters, adapter_root=adapter_root)

        def launch(config: Mapping[str, Any]) -> EngineLauncher:
            if launcher == "processes":
                return EngineProcesses(config)
            from symbiosis.app.cluster.ray_engines import RayEngines

            slots = (max_engines or engines) if here is None else here
            return RayEngines(config, secret_file=secret_file, slots=slots, port=ray_port, gpus=gpus, address=ray_address)

        with (
            err.status("Starting the director and the engines"),
            _closing_quietly(),
        ):
            cluster = ClusterHost(
                http,
                engine=engine,
                engines=engines,
                max_engines=max_engines,
                host=host,
                port=port,
                secret=secret,
                state=state,
                profile=None if profile is None else str(profile),
                objective=Objective(ttft_s=ttft, tpot_s=tpot),
                temperature=temperature,
                adapters=adapters,
                workers=default_workers(device) if http_workers is None else http_workers,
                requests=RequestLimits(at_once=tenant_requests, per_minute=tenant_rate),
                launcher=launch,
                keys=keys,
                admin_key=admin_key,
                adapter_root=adapter_root,
                uploads=uploads,
                job_limits=JobLimits(running=running_jobs),
                shutdown_delay_s=shutdown_delay,
                store=None if store is None else resolve_url(store),
                store_cache_gb=store_cache_gb,
            )
        stopped = _stop_on_signals()
        with cluster:
            director = cluster.director.messages.removeprefix("tcp://")
            ray = getattr(cluster.launcher, "address", None) if ray_address is None else None
            folder.record(url=cluster.url, director=director, ray=ray)
            typer.echo(f"director at {director}" + ("" if ray is None else f", Ray at {ray}"))
            typer.echo(f"listening at {cluster.url}")
            _explain_join(director, ray, secret_file)
            sys.stdout.flush()  # scripts read these lines
            while not stopped.wait(_CHECK_S):
                cluster.check()
            err.print("stopping")


@app.command(
    epilog="Examples: symbiosis cluster join 10.0.0.1:7778 --secret-file secret --model MODEL --engines 2   "
    "symbiosis cluster join 10.0.0.1:7778 --ray 10.0.0.1:6379 --secret-file secret --engines 8 --device cuda"
)
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of the director, as `up` prints it.")],
    secret_file: SecretFile = None,
    state: State = None,
    engines: Annotated[
        int, typer.Option("--engines", min=1, max=4096, help="Engines of this host; with --ray: the most that it has room for.")
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="HOST:PORT",
            show_default=False,
            help="Join this Ray cluster, as `up` prints it: the cluster places engines here when it needs them.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="IP",
            show_default=False,
            help="Where the engines listen. (default: this host's address on the way)",
        ),
    ] = None,
    ready_file: ReadyFile = None,
    store_cache_gb: StoreCacheGb = 20.0,
    model: ModelOption = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: Threads = None,
    gpus: Gpus = None,
    no_training: NoTraining = False,
    cache_gb: CacheGb = None,
    host_cache_gb: HostCacheGb = 0.0,
    adapter_gb: AdapterGb = 2.0,
    adapter_host_gb: AdapterHostGb = 4.0,
    max_rows: MaxRows = 2048,
    max_running: MaxRunning = 512,
) -> None:
    """Add engines of this host to a cluster until Ctrl-C.

    Copy the secret file of `up` first (scp keeps it private). The engines serve the same model: the cluster rejects others.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if ray is not None and ready_file is not None:
        raise SymbiosisError("--ready-file is for engines of this host: leave it out with --ray")
    with err.status("Joining"):
        from symbiosis.app.cluster.joined_engines import JoinedEngines, check_director, own_host_towards
        from symbiosis.app.cluster.secret_file import read_secret
        from symbiosis.app.cluster.state_folder import default_state_folder

        secret_file = secret_file or (state or default_state_folder()) / "secret"
        secret = read_secret(secret_file)
        check_director(address, secret)
        host = host or own_host_towards(address)
    if ray is not None:
        from symbiosis.app.cluster.ray_engines import check_installed
        from symbiosis.app.cluster.ray_node import RayNode

        check_installed()
        with err.status("Starting a Ray node"):
            slots = None if device.startswith("cuda") else 0
            node = RayNode(secret, secret_file, host=host, join=ray, slots=engines, gpus=gpus if gpus is not None else slots)
        try:
            stopped = _stop_on_signals()
            typer.echo(f"joined {ray}: room for {engines} engines")
            sys.stdout.flush()
            while not stopped.wait(_CHECK_S):
                node.check()
            err.print("stopping")
        finally:
            node.close()
        return
    engine = engine_config(
        model, device, dtype, threads, no_training, cache_gb, host_cache_gb, adapter_gb, adapter_host_gb, max_rows, max_running
    )

    def report(name: str) -> None:
        typer.echo(f"{name} has joined {address}")
        sys.stdout.flush()

    with JoinedEngines(
        address,
        secret,
        engine=engine,
        engines=engines,
        host=host,
        joined=report,
        ready_file=ready_file,
        store_cache_gb=store_cache_gb,
    ) as joined:
        stopped = _stop_on_signals()
        while not stopped.wait(_CHECK_S):
            if not joined.check():
                err.print("the cluster has let all engines of this host go")
                break
        err.print("stopping")


@app.command(epilog="Example: symbiosis cluster status --connect http://10.0.0.1:8000 --key ADMINS-SECRET")
def status(
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="URL",
            show_default=False,
            help="The cluster's HTTP address. (default: of the cluster on this host)",
        ),
    ] = None,
    key: Key = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the engines of a cluster, and what waits. With keys, the admin's is needed."""
    from symbiosis.cli.http_client import HttpClient

    if connect is None:
        from symbiosis.app.cluster.state_folder import default_state_folder, running_cluster

        connect = (running_cluster(state or default_state_folder()) or {}).get("url") or DEFAULT_URL
    statistics = HttpClient(connect, key).statistics()
    if "engines" not in statistics:
        raise SymbiosisError(f"{connect} is one server, not a cluster: symbiosis top --connect {connect}")
    engines, cluster = statistics["engines"], statistics["cluster"]
    if as_json:
        typer.echo(json.dumps({"model": statistics["model"], "cluster": cluster, "engines": engines}, indent=2))
        return
    print_cluster(statistics)


@app.command(
    epilog="Examples: symbiosis cluster drain engine-1a2b3c4d   symbiosis cluster drain --all   "
    "symbiosis cluster drain NAME --connect 10.0.0.1:7778 --secret-file secret"
)
def drain(
    engines: Annotated[
        list[str] | None, typer.Argument(metavar="ENGINE...", show_default=False, help="Names, as `status` shows them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every engine, one at a time: a rolling restart.")] = False,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="ADDRESS",
            show_default=False,
            help="HOST:PORT of the director. (default: of the cluster on this host)",
        ),
    ] = None,
    secret_file: SecretFile = None,
    state: State = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For one engine.")] = 600.0,
) -> None:
    """Replace engines without interrupting a request: each finishes its requests, or hands them over after 15 s."""
    if bool(engines) == every:
        raise SymbiosisError("name the engines to drain, or add --all: `symbiosis cluster status` shows their names")
    from symbiosis.app.cluster.engine_drain import drain_engines
    from symbiosis.app.cluster.joined_engines import check_director
    from symbiosis.app.cluster.secret_file import read_secret
    from symbiosis.app.cluster.state_folder import default_state_folder, running_cluster

    state = state or default_state_folder()
    if connect is None:
        connect = (running_cluster(state) or {}).get("director")
        if connect is None:
            raise SymbiosisError(f"no cluster runs in {state}: name its folder with --state, or its director with --connect")
    secret = read_secret(secret_file or state / "secret")
    check_director(connect, secret)

    def report(name: str, seconds: float) -> None:
        typer.echo(f"{name} has left and is replaced, after {seconds:.1f} s")
        sys.stdout.flush()

    with err.status("Draining"):
        drain_engines(connect, secret, engines or [], timeout_s=timeout, drained=report)


@app.command(epilog="Example: symbiosis cluster down")
def down(
    state: State = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time to end.")] = 120.0,
) -> None:
    """End the cluster that `up` runs on this host: running requests finish first, for half a minute."""
    from symbiosis.app.cluster.state_folder import default_state_folder, stop_cluster

    with err.status("Stopping"):
        pid = stop_cluster(state or default_state_folder(), timeout)
    typer.echo(f"the cluster has ended (process {pid})")


def _stop_on_signals() -> Stop:
    """After Ray, which has a handler of its own."""
    stopped = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stopped)
    return stopped


@contextmanager
def _closing_quietly() -> Iterator[None]:
    """Ctrl-C while starting: everything that was started has been closed."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _explain_join(director: str, ray: str | None, secret_file: Path) -> None:
    if director.startswith("127."):
        typer.echo("Other hosts cannot join: add --host IP, an address of this host that they reach.")
        return
    node = "" if ray is None else f" --ray {ray}"
    typer.echo(
        f"\nAnother host joins with a copy of {secret_file.resolve()}:\n"
        f"  symbiosis cluster join {director}{node} --secret-file secret --engines 1\n"
    )
