"""`symbiosis plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from symbiosis.errors import SymbiosisError

err = Console(stderr=True)

app = typer.Typer()

_EPILOG = (
    "Examples: symbiosis plan --tenants '4 x train,lora,r=16,batch=4x512'   "
    "symbiosis plan MODEL --tenants 'serve,context=8k,streams=64' --tenants '2 x job,length=1k' --devices 'h200, cpu:256GB'"
)
_TENANTS = (
    "[COUNT x] WORKLOAD[,OPTION …]; repeatable. Workloads: train and generate (the tenant's own process), serve and job "
    "(hosted). Options of train: batch=4x512, lora|rslora|dora|ia3|prefix|prompt|ptuning, r=16, targets=q_proj+v_proj, "
    "adamw|sgd|…, checkpointing, cpu|cuda, remote. Of generate: context=8k, streams=4, cpu|cuda, remote. "
    "Of serve: context=8k, streams=64, adapters=32, r=16. Of job: length=1k, lora, r=16. (default: one train and one serve)"
)
_DEVICES = (
    "KIND[:MEMORY][:BANDWIDTH][:SPEED] [x COUNT], comma-separated, such as 'cuda:80GB x 2, cpu:64GB', 'h200' or "
    "'cuda:24GB:1TB/s:150TFLOPS'. (default: this machine, with the memory that is free now)"
)


@app.command(epilog=_EPILOG)
def plan(
    model: Annotated[str | None, typer.Argument(show_default=False, help="Folder or hub id; none: the default model.")] = None,
    tenants: Annotated[list[str] | None, typer.Option("--tenants", metavar="SPEC", help=_TENANTS)] = None,
    devices: Annotated[list[str] | None, typer.Option("--devices", metavar="SPEC", help=_DEVICES)] = None,
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="float32, bfloat16 or float16; none: that of the checkpoint.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(show_default=False, help="Divide the base layers among exactly so many devices.")
    ] = None,
    link: Annotated[str, typer.Option(metavar="RATE", help="Network of remote tenants.")] = "10Gbit/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Say what fits where, before anything is loaded: memory by part, step times, traffic, and a placement."""
    from symbiosis.planning.quantities import parse_rate

    rate = parse_rate(link, "bit/s")
    if rate is None:
        raise SymbiosisError(f"--link {link!r:.40}: expected a rate such as 10Gbit/s")
    with err.status("Importing torch and transformers, whose memory is part of the plan: some 10 s") as status:
        import symbiosis.app.http_host  # noqa: F401 - a server's imports are measured
        from symbiosis.app.planning.plan import make_plan
        from symbiosis.cli.views.plan_view import print_plan
        from symbiosis.planning.devices import parse_devices, this_machine
        from symbiosis.planning.estimates import read_resident
        from symbiosis.planning.tenants import parse_tenants

        status.update("Planning")
        imports = read_resident()  # of processes like this one, before a model is built
        loads = parse_tenants(tenants or ["train", "serve"])
        found = parse_devices(devices) if devices else this_machine()
        made = make_plan(model, loads, found, dtype=dtype, shards=shards, link_bandwidth=rate / 8, imports=imports)
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=2))
    else:
        print_plan(made)
