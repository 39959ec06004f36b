"""`symbiosis zoo profile` and `symbiosis zoo simulate`: what blocks cost, and how a cluster serves them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from symbiosis.errors import SymbiosisError

err = Console(stderr=True)

_SYSTEM = (
    "blocks (each block once, batches over all its applications), multi-adapter (one engine for a base and its adapters), "
    "parameter-sharing (weights shared, batches not) or per-model; repeatable, to compare. (default: blocks)"
)
_TRACE = "Arrivals and lengths of a recorded trace, as for `symbiosis simulate`. (default: the paper's workload)"
_SERVERS = "Devices of each server."
PROFILE_EPILOG = "Example: symbiosis zoo profile ./zoo --out blocks.json && symbiosis zoo simulate --profile blocks.json"
SIMULATE_EPILOG = (
    "Example: symbiosis zoo simulate --applications 30 --system blocks --system per-model --plot zoo.png"
    "   symbiosis zoo simulate --requests 2000 --duration 20 --max-loss 0.4"
)


def profile(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The zoo.", show_default=False)],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller batches.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Write JSON here; none: print.")] = None,
) -> None:
    """Measure the blocks of a zoo's models: time by rows and context, bytes, loading. One model of each shape."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise SymbiosisError(f"cannot write {out}: expected a file in a folder that exists")
    with err.status("Starting") as status:
        from symbiosis.app.planning.block_profile import profile_zoo, zoo_profile_to_json
        from symbiosis.zoo.block_timing import TimingPlan
        from symbiosis.zoo.zoo import Zoo

        small = TimingPlan(batches=(1, 4), contexts=(16, 48), prompts=(8, 16, 48), repetitions=3)
        found = profile_zoo(
            Zoo(folder),
            small if quick else TimingPlan(),
            device=device,
            progress=lambda text: status.update(f"Measuring {text}"),
        )
    text = json.dumps(zoo_profile_to_json(found), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise SymbiosisError(f"cannot write {out}: {error.strerror}") from None
    for name, model in found.profile.models.items():
        whole = model.whole
        typer.echo(
            f"{name}: {model.layers} layers, {whole.weight_bytes / 1e6:,.1f} MB; {whole.fixed_s * 1e3:.3g} ms a batch, "
            f"{whole.row_s * 1e6:.3g} us a decode row, {whole.prefill_s * 1e6:.3g} us a prompt token; "
            f"{whole.kv_bytes:,} bytes of KV cache a token"
        )
    typer.echo(
        f"median error {found.median_error:.1%}; weights are loaded at {found.profile.load_bytes_s / 1e9:.2f} GB/s. "
        f"Written to {out}"
    )


def simulate(
    applications: Annotated[int, typer.Option(min=1, max=10_000, help="Fine-tunes of the profile's models.")] = 20,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests of all applications together.")] = 400,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="In which they arrive: the paper's minutes, as seconds.")
    ] = 20.0,
    system: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_SYSTEM)] = None,
    placement: Annotated[str, typer.Option(help="locality or fragmentation: where blocks are placed.")] = "locality",
    kv: Annotated[
        str, typer.Option(help="owner-first, least-busy or recompute: who goes on with a request that has a KV cache.")
    ] = "owner-first",
    max_loss: Annotated[
        float,
        typer.Option(min=0, max=100, help="Adaptive serving: nats per token that an equivalent chain may lose; 0: own chains."),
    ] = 0.0,
    servers: Annotated[str, typer.Option(metavar="N,N,…", help=_SERVERS)] = "2,2,4,4",
    memory_gb: Annotated[float, typer.Option(min=0.001, max=10_000, help="Of a device, for weights and KV cache.")] = 72.0,
    network_gbit: Annotated[float, typer.Option(min=0.001, max=100_000, help="Gbit/s between servers.")] = 100.0,
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Costs of blocks: a100, h200, or a file of `symbiosis zoo profile`.")
    ] = "a100",
    trace: Annotated[str | None, typer.Option(metavar="FILE", show_default=False, help=_TRACE)] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Trace with lengths, for a trace of rates.")
    ] = None,
    begin: Annotated[float, typer.Option(metavar="HOURS", min=0, help="Begin of the simulated part of the trace.")] = 0.0,
    end: Annotated[
        float | None, typer.Option(metavar="HOURS", min=0, show_default=False, help="Its end; none: that of the trace.")
    ] = None,
    rate_scale: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Times the rate of the trace.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of popularity, arrivals and lengths.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw the runs over time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate many fine-tunes on the devices of several servers: latencies, throughput, traffic between servers.

    Nothing is loaded: blocks are costs (--profile). The policies are those that place and dispatch blocks. The default workload
    and devices are BlockLLM's: 12 A100 in 4 servers, 400 requests of 20 applications, one of five with all parameters tuned.
    """
    from symbiosis.cli.loss_plot import check_plot_file
    from symbiosis.cli.views.block_view import plot_block_reports, print_block_reports
    from symbiosis.cluster.policies.blocks.block_cost import read_block_profile
    from symbiosis.cluster.policies.blocks.block_placement import PlacementRule
    from symbiosis.cluster.policies.blocks.block_policy import BlockPolicyConfig
    from symbiosis.cluster.policies.blocks.dispatch import DispatchConfig, KvRule
    from symbiosis.cluster.policies.blocks.topology import BlockTopology
    from symbiosis.cluster.simulation.blocks.block_experiment import make_workload, parse_system, run_blocks, workload_of
    from symbiosis.cluster.simulation.trace import read_trace

    if plot is not None:
        check_plot_file(plot)
    if end is not None and end <= begin:
        raise SymbiosisError(f"--end {end:g} is not after --begin {begin:g}")
    if placement not in list(PlacementRule):
        raise SymbiosisError(f"no placement {placement!r:.40}: expected {' or '.join(PlacementRule)}")
    if kv not in list(KvRule):
        raise SymbiosisError(f"no rule {kv!r:.40} for the KV cache: expected {', '.join(KvRule)}")
    counts = servers.split(",")
    if not all(each.strip().isdecimal() for each in counts):
        raise SymbiosisError(f"--servers is {servers!r:.60}: expected the devices of each server, such as 2,2,4,4")
    costs, systems = read_block_profile(profile), [parse_system(name) for name in system or ["blocks"]]
    topology = replace(
        BlockTopology(servers=tuple(int(each) for each in counts)),
        memory_bytes=int(memory_gb * 1e9),
        net_bytes_s=network_gbit * 1e9 / 8,
        load_bytes_s=costs.load_bytes_s,
    )
    config = BlockPolicyConfig(dispatch=DispatchConfig(kv_rule=KvRule(kv)), placement=PlacementRule(placement))
    if trace is None:
        workload = make_workload(applications, costs, requests=requests, duration_s=duration, prompt=300, output=200, seed=seed)
    else:
        until = math.inf if end is None else end * 3600
        found = read_trace(trace, lengths=lengths, rate_scale=rate_scale, begin_s=begin * 3600, end_s=until, seed=seed)
        workload = workload_of(found, applications, costs, seed=seed)
    reports = []
    for each in systems:
        with err.status(f"Simulating {each}"):
            reports.append(run_blocks(each, workload, costs, topology=topology, config=config, max_loss=max_loss))
    if as_json:
        typer.echo(json.dumps({"profile": costs.to_json(), "runs": [report.to_json() for report in reports]}, indent=2))
    else:
        print_block_reports(reports, Console(), profile)
    if plot is not None:
        plot_block_reports(reports, plot)
