"""`symbiosis simulate`."""

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

app = typer.Typer()

_TRACE = (
    "A file (Azure's CSV, Mooncake's JSON lines, ServeGen's rates; also .gz), or a synthetic trace: "
    "poisson:rate=20,duration=600,prompt=1000,output=200 or ramp:… with the same settings."
)
_POLICY = (
    "symbiosis, largest-working-set, power-of-two, ray-serve:TARGET, ray-serve-prefix:TARGET or static:ENGINES; repeatable, to "
    "compare. (default: symbiosis)"
)
_EPILOG = (
    "Example: symbiosis simulate --trace ramp:rate=40,duration=900 --adapters 32 --gpus 16 --policy symbiosis "
    "--policy ray-serve:16 --plot cluster.png. Many fine-tunes that share blocks: symbiosis zoo simulate"
)


@app.command(epilog=_EPILOG)
def simulate(
    trace: Annotated[str, typer.Option(metavar="FILE|SYNTHETIC", help=_TRACE)] = "poisson:rate=20,duration=600",
    gpus: Annotated[int, typer.Option(min=1, max=100_000, help="Most engines, one for each GPU.")] = 16,
    policy: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_POLICY)] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Trace with lengths, for a trace of rates.")
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Cost of a step: h200-7b, h200-70b, or a file of `symbiosis profile`.")
    ] = "h200-7b",
    rate_scale: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Times the rate of the trace.")] = 1.0,
    begin: Annotated[float, typer.Option(metavar="HOURS", min=0, help="Begin of the simulated part of the trace.")] = 0.0,
    end: Annotated[
        float | None, typer.Option(metavar="HOURS", min=0, show_default=False, help="Its end; none: that of the trace.")
    ] = None,
    adapters: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Adapters of a trace without tenants; 0: the base model only.")
    ] = 0,
    zipf: Annotated[float, typer.Option(min=0, max=10, help="Popularity of these adapters.")] = 1.5,
    ttft: Annotated[float, typer.Option(metavar="SECONDS", min=0.001, help="Objective for the first token (TTFT).")] = 2.0,
    tpot: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Objective for each later token, in the mean (TPOT).")
    ] = 0.1,
    fail_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, show_default=False, help="Lose the fullest engine as often.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and random choices.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw the runs over time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a cluster of engines on a trace: GPU-hours, times to the first and between tokens, adapters.

    Nothing is loaded and no GPU is needed: an engine is a cost model, by default that of a 7B model on an H200 (--profile).
    TTFT is the time to the first token of a request, TPOT the mean time of each later token.
    """
    from symbiosis.cli.loss_plot import check_plot_file
    from symbiosis.cli.views.simulation_view import plot_reports, print_reports
    from symbiosis.cluster.policies.objective import Objective
    from symbiosis.cluster.simulation.experiment import parse_synthetic, run_experiment
    from symbiosis.cluster.simulation.trace import read_trace
    from symbiosis.cluster.step_cost import read_step_cost

    if plot is not None:
        check_plot_file(plot)
    if end is not None and end <= begin:
        raise SymbiosisError(f"--end {end:g} is not after --begin {begin:g}")
    cost = read_step_cost(profile)
    if trace.partition(":")[0] in ("poisson", "ramp"):
        synthetic = replace(parse_synthetic(trace, seed), name=trace.partition(":")[0])
        requests = synthetic.scaled(rate_scale, seed)
    else:
        until = math.inf if end is None else end * 3600
        requests = read_trace(trace, lengths=lengths, rate_scale=rate_scale, begin_s=begin * 3600, end_s=until, seed=seed)
    if adapters:
        requests = requests.with_adapters(adapters, zipf, seed)
    reports = []
    for name in policy or ["symbiosis"]:
        with err.status(f"Simulating {name}"):
            report = run_experiment(
                name,
                requests,
                cost,
                most_engines=gpus,
                objective=Objective(ttft_s=ttft, tpot_s=tpot),
                fail_every_s=fail_every,
                seed=seed,
            )
        reports.append(report)
    if as_json:
        typer.echo(json.dumps({"step_cost": cost.to_json(), "runs": [report.to_json() for report in reports]}, indent=2))
    else:
        print_reports(reports, Console(), profile)
    if plot is not None:
        plot_reports(reports, plot)
