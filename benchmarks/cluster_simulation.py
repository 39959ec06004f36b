"""How many GPU-hours does a cluster need to keep its objective, under its own policy, Ray Serve's, and a fixed size?

The objective is the first token within 2 s and 100 ms for each later one, for 99 % of all requests. Ray Serve's router and
autoscaler get the best of several targets, found on the very trace that is measured; the fixed size is the smallest that keeps
the objective in the busiest half hour (static), and over the whole trace (static, whole). Symbiosis has its defaults, tuned on
day 1 of the rates; `swept` is the best of several shares of work (`fill`), found on the measured trace as Ray's target is. All
policies have the same engines, costs and time to start one, the same engines at the start, and the same most engines.

    python -m benchmarks.cluster_simulation --traces FOLDER            # all cases, about 40 minutes
    python -m benchmarks.cluster_simulation --traces FOLDER azure-7b   # one case
    python -m benchmarks.cluster_simulation decisions                            # without traces
    python -m benchmarks.cluster_simulation --tiny                               # synthetic, seconds, for the tests
"""

from __future__ import annotations

import argparse
import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.results import FOLDER, save
from symbiosis.cli.views.simulation_view import plot_reports, print_reports
from symbiosis.cluster.policies.cluster_state import ClusterRequest
from symbiosis.cluster.policies.placement import PLACEMENTS
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig
from symbiosis.cluster.policies.scaling import ScalingConfig, allowed_utilization
from symbiosis.cluster.simulation.experiment import parse_synthetic, run_experiment
from symbiosis.cluster.simulation.report import SimulationReport
from symbiosis.cluster.simulation.trace import Trace, read_trace
from symbiosis.cluster.step_cost import PROFILES, StepCost

QUESTION = "How many GPU-hours does a cluster need to keep its objective, against Ray Serve and a fixed size?"
SHARE = 0.99
FILLS = (0.8, 1.0, 1.1)
DAY_S = 86400.0
PEAK_S = 1800.0
ORACLE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trace and its engines."""

    profile: str
    day: float
    """First day of ServeGen's rates; day 1 is for tuning."""
    hours: float
    rate_scale: float
    lengths: str = "azure_conv.csv.gz"
    targets: tuple[float, ...] = (8, 12, 16, 20, 24)
    """Of Ray Serve's autoscaler."""
    routers: tuple[str, ...] = ("ray-serve",)
    of_idle: bool = False
    """Count the time to the first token from that of an idle engine: prompts of this trace take longer than 2 s there."""
    engines: int | None = None
    """Fixed size, without a search."""


CASES = {
    "tuning-7b": Case(profile="h200-7b", day=1, hours=1.5, rate_scale=0.3),
    "azure-7b": Case(profile="h200-7b", day=10, hours=3, rate_scale=0.25, targets=(12, 16, 20, 24, 32)),
    "azure-code-7b": Case(
        profile="h200-7b", day=9, hours=1, rate_scale=0.25, lengths="azure_code.csv.gz", targets=(2, 4, 8, 12, 16)
    ),
    "azure-70b": Case(profile="h200-70b", day=10, hours=12, rate_scale=0.08, targets=(2, 3, 4, 6)),
    "mooncake-7b": Case(
        profile="h200-7b",
        day=10,
        hours=6,
        rate_scale=0.03,
        lengths="mooncake_conversation.jsonl.gz",
        targets=(2, 3, 4, 6),
        routers=("ray-serve", "ray-serve-prefix"),
        of_idle=True,
    ),
    "thousand-70b": Case(profile="h200-70b", day=10, hours=0.125, rate_scale=6.5, targets=(4,), engines=1000),
}


def kept(report: SimulationReport, case: Case) -> float:
    return report.within_of_idle if case.of_idle else report.within


def busiest(trace: Trace, seconds: float) -> Trace:
    """The part of a trace with the most requests."""
    arrivals = trace.arrivals
    best = max(
        (bisect.bisect_left(arrivals, start + seconds) - bisect.bisect_left(arrivals, start), start)
        for start in np.arange(0, max(1.0, trace.duration - seconds), 60.0).tolist()
    )[1]
    first, last = bisect.bisect_left(arrivals, best), bisect.bisect_left(arrivals, best + seconds)
    part = slice(first, last)
    return Trace(
        f"busiest of {trace.name}",
        [at - best for at in arrivals[part]],
        trace.prompts[part],
        trace.outputs[part],
        trace.adapters[part],
        trace.blocks[part],
        trace.copies[part],
    )


def smallest(trace: Trace, cost: StepCost, case: Case, high: int, low: int = 1) -> tuple[int, SimulationReport]:
    """The smallest fixed size that keeps the objective."""
    best: tuple[int, SimulationReport] | None = None
    while low < high:
        middle = (low + high) // 2
        report = run_experiment(f"static:{middle}", trace, cost, most_engines=middle)
        if kept(report, case) >= SHARE:
            high, best = middle, (middle, report)
        else:
            low = middle + 1
    return best or (high, run_experiment(f"static:{high}", trace, cost, most_engines=high))


def work_bound(trace: Trace, cost: StepCost) -> float:
    """Engines that the work of a trace keeps busy, without any margin."""
    work = sum(
        cost.prompt_s(prompt) + cost.completion_s(prompt, output)
        for prompt, output in zip(trace.prompts, trace.outputs, strict=True)
    )
    return work / max(1.0, trace.duration)


def oracle_gpu_hours(trace: Trace, cost: StepCost) -> float | None:
    """In each ten minutes, the fewest engines that do its work, as busy as the objective allows; their start takes no time.

    None for a trace with prefixes: caches save a part of its work.
    """
    if trace.blocks:
        return None
    work_s = np.zeros(int(trace.duration // ORACLE_S) + 1)
    for at, prompt, output in zip(trace.arrivals, trace.prompts, trace.outputs, strict=True):
        work_s[int(at // ORACLE_S)] += cost.prompt_s(prompt) + cost.completion_s(prompt, output)
    seconds = np.full(len(work_s), ORACLE_S)
    seconds[-1] = trace.duration - ORACLE_S * (len(work_s) - 1)
    utilization = allowed_utilization(ScalingConfig(), cost.fixed_s)
    engines = np.maximum(1, np.ceil(work_s / np.maximum(1.0, seconds) / utilization))
    return float((engines * seconds).sum() / 3600)


def measure(name: str, case: Case, trace: Trace, cost: StepCost, folder: Path, console: Console) -> dict[str, Any]:
    """All policies on one trace."""
    peak = busiest(trace, min(PEAK_S, trace.duration / 2))
    if case.engines is None:
        bound = work_bound(peak, cost)
        fixed, _ = smallest(peak, cost, case, high=int(4 * bound) + 4, low=max(1, int(bound)))
        most = fixed + fixed // 2 + 1
    else:
        fixed = most = case.engines
    ours = run_experiment("symbiosis", trace, cost, most_engines=most)
    print_reports([ours], console, case.profile)
    swept = []
    for fill in FILLS if case.engines is None else ():
        config = PolicyConfig(scaling=ScalingConfig(fill=fill))
        report = run_experiment("symbiosis", trace, cost, most_engines=most, config=config)
        swept.append(replace(report, policy=f"symbiosis, fill {fill:g}"))
        print_reports(swept[-1:], console, case.profile)
    ray = []
    for router in case.routers:
        for target in case.targets:
            report = run_experiment(f"{router}:{target:g}", trace, cost, most_engines=most)
            print_reports([report], console, case.profile)
            ray.append(report)
    good = [report for report in ray if kept(report, case) >= SHARE]
    best = min(good, key=lambda each: each.gpu_hours) if good else max(ray, key=lambda each: kept(each, case))
    punica = [run_experiment("largest-working-set", trace, cost, most_engines=most)] if case.engines is None else []
    tight = min((each for each in [ours, *swept] if kept(each, case) >= SHARE), key=lambda each: each.gpu_hours, default=ours)
    static = run_experiment(f"static:{fixed}", trace, cost, most_engines=fixed)
    whole, size = static, fixed
    while case.engines is None and size > 1:
        size -= 1
        report = run_experiment(f"static:{size}", trace, cost, most_engines=size)
        if kept(report, case) < SHARE:
            break
        whole = report
    shown = [ours, *punica, best, static]
    figures = {
        "case": {**vars(case)},
        "trace": trace.name,
        "requests": len(trace),
        "step_cost": cost.to_json(),
        "scaling": repr(ScalingConfig()),
        "kept": {report.policy: kept(report, case) for report in [ours, *swept, *punica, *ray, static, whole]},
        "gpu_hours": {report.policy: report.gpu_hours for report in [ours, *swept, *punica, *ray, static, whole]},
        "best_ray_serve": best.policy,
        "ray_serve_keeps_the_objective": bool(good),
        "against_ray_serve": ours.gpu_hours / best.gpu_hours - 1,
        "swept": tight.policy,
        "swept_against_ray_serve": tight.gpu_hours / best.gpu_hours - 1,
        "swept_against_static": tight.gpu_hours / static.gpu_hours - 1,
        "against_static": ours.gpu_hours / static.gpu_hours - 1,
        "against_static_whole": ours.gpu_hours / whole.gpu_hours - 1,
        "oracle_gpu_hours": oracle_gpu_hours(trace, cost),
        "simulated_s": ours.seconds,
        "runs": [report.to_json(timeline=False) for report in [ours, *swept, *punica, *ray, static, whole]],
    }
    path = save(f"cluster-simulation-{name}", QUESTION, {"script": "cluster_simulation", **figures}, folder)
    plot_reports(shown, path.with_suffix(".png"))
    print_reports(shown, console, case.profile)
    return figures


def decisions(engines: int, running: int, count: int, folder: Path, name: str) -> dict[str, Any]:
    """Time of single decisions of a full cluster by placement: a request ends, and another one arrives."""
    found = {placement: time_decisions(engines, running, count, placement) for placement in PLACEMENTS}
    figures = {"engines": engines, "running": running, "decisions": count, "placements": found}
    save(name, QUESTION, {"script": "cluster_simulation", **figures}, folder)
    return figures


def time_decisions(engines: int, running: int, count: int, placement: str) -> dict[str, float]:
    """Percentiles of wall-clock time, and of processor time, of one decision."""
    cost = PROFILES["h200-7b"]
    policy = ClusterPolicy(PolicyConfig(placement=placement), cost)
    gap_s = 8 / running  # a request takes about 8 s
    for _ in range(engines):
        policy.engine_ready(policy.add_engine(0.0).number, 0.0)
    generator = np.random.default_rng(0)
    prompts = generator.integers(50, 4000, running + count).tolist()
    adapters = [f"a{index}" for index in generator.zipf(1.5, running + count).clip(1, 2000).tolist()]
    placed: list[ClusterRequest] = []
    now, times, cpu_times = 0.0, [], []
    for number in range(running + count):
        now += gap_s
        request = ClusterRequest(number, adapters[number], adapters[number], prompts[number], now)
        if number >= running:
            index = int(generator.integers(len(placed)))
            ended, placed[index] = placed[index], placed[-1]
            placed.pop()
            policy.finish(ended, now, 200)
        started, started_cpu = time.perf_counter(), time.thread_time()
        engine = policy.submit(request, now)
        found = policy.dispatch(now) if engine < 0 else [request]
        if number >= running:
            cpu_times.append(time.thread_time() - started_cpu)
            times.append(time.perf_counter() - started)
        for each in found:
            policy.finish_prefill(each, now)
        placed += found
    policy.state.check_integrity()
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    cpu_p50, cpu_p99 = np.percentile(cpu_times, [50, 99]).tolist()
    return {"p50_s": p50, "p99_s": p99, "cpu_p50_s": cpu_p50, "cpu_p99_s": cpu_p99, "running": len(placed)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} or decisions; none: all")
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    console = Console(width=120)
    if options.tiny:
        trace = parse_synthetic("ramp:rate=8,duration=240", 0).with_adapters(8, 1.5, 0)
        tiny = Case(profile="h200-7b", day=0, hours=0.1, rate_scale=1, targets=(4, 8))
        measure("tiny", tiny, trace, PROFILES[tiny.profile], options.out, console)
        decisions(8, 64, 50, options.out, "cluster-decisions-tiny")
        return
    chosen = options.cases or [*CASES, "decisions"]
    unknown = set(chosen) - {*CASES, "decisions"}
    if unknown or (options.traces is None and set(chosen) != {"decisions"}):
        parser.error(f"unknown cases {sorted(unknown)}" if unknown else "--traces FOLDER is missing")
    for name in chosen:
        if name == "decisions":
            console.print(decisions(1000, 32_000, 50_000, options.out, "cluster-decisions"))
            continue
        case = CASES[name]
        trace = read_trace(
            options.traces / "servegen_m_large_rates.csv.gz",
            lengths=options.traces / case.lengths,
            rate_scale=case.rate_scale,
            begin_s=case.day * DAY_S,
            end_s=case.day * DAY_S + case.hours * 3600,
        )
        measure(name, case, trace, PROFILES[case.profile], options.out, console)


if __name__ == "__main__":
    main()
