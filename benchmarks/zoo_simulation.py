"""What do blocks gain over whole models on several servers, and what do locality, adaptive serving and KV rules add?

The workload is BlockLLM's as far as its paper says: 12 GPUs in servers of 2, 2, 4 and 4, 400 requests, 20 and 30 applications
of uniform popularity, Poisson arrivals. Assumed, since it is silent: lengths (log-normal prompts around 300, geometric
completions around 200, 1,024 at most), which fine-tunes there are and what they share
(`cluster/simulation/blocks/applications.py`), costs (a 7B model measured on an H200, scaled to an A100). Its engines take
minutes for a request; ours take seconds, so its 20 minutes are 20 seconds: the median latency of per-model provisioning is then
about the same share of the trace (17 % there).

Every system has the same costs, devices, memory, batches, dispatch and scaling. Settings were chosen on seeds 100 and 101.

    python -m benchmarks.zoo_simulation                         # all cases but the trace, about 4 minutes
    python -m benchmarks.zoo_simulation --traces FOLDER trace   # ServeGen's rates x Azure's conversations
    python -m benchmarks.zoo_simulation --tiny                  # seconds, for the tests
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.results import FOLDER, save
from symbiosis.cli.views.block_view import plot_block_reports, print_block_reports
from symbiosis.cluster.policies.blocks.block_cost import BLOCK_PROFILES
from symbiosis.cluster.policies.blocks.block_placement import PlacementRule
from symbiosis.cluster.policies.blocks.block_policy import BlockPolicyConfig, provision_cluster
from symbiosis.cluster.policies.blocks.block_queue import BatchConfig
from symbiosis.cluster.policies.blocks.dispatch import DispatchConfig, KvRule
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.cluster.simulation.blocks.applications import FULL, BlockSystem, ZooApplication, make_applications, make_catalog
from symbiosis.cluster.simulation.blocks.block_experiment import BlockWorkload, make_workload, run_blocks, workload_of
from symbiosis.cluster.simulation.blocks.block_report import BlockReport
from symbiosis.cluster.simulation.trace import Trace, read_trace

QUESTION = "What do blocks gain over whole models on several servers, and what do their policies add?"
PROFILE = BLOCK_PROFILES["a100"]
PAPER = {
    "blocks against per-model": {"p95": -0.335, "throughput": 1.71},
    "blocks against parameter sharing": {"p95": -0.234, "throughput": 1.46},
    "30 applications, against per-model": {"p95": -0.374, "throughput": 1.85},
    "fragmentation against locality": {"p95": 0.182, "traffic of locality": -0.723},
    "without adaptive serving": {"p95": 0.156, "throughput": -0.237},
    "KV recomputed": {"p95": 1.23},
    "KV to the least busy": {"p95": 1.36},
}
CHANGED = ("latency_p50_s", "latency_p95_s", "throughput", "between_servers_gb", "weight_gb")
MAX_LOSS = 0.347
"""Of the smaller model: what every tenant allows in the cases of adaptive serving."""
SMALL_MEMORY = 20_000_000_000
"""Devices on which no whole 13B model fits: chains have to be cut."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is simulated."""

    seeds: int = 5
    applications: tuple[int, ...] = (20, 30)
    requests: int = 400
    duration_s: float = 20.0
    busy_requests: int = 2000
    busy_s: float = 8.0
    surge_s: float = 25.0


TINY = Sizes(seeds=1, applications=(10,), requests=40, duration_s=2.0, busy_requests=150, busy_s=0.5, surge_s=1.0)


def change(reports: Sequence[BlockReport], bases: Sequence[BlockReport]) -> dict[str, Any]:
    """Medians over seeds, and the median, least and largest ratio within a seed."""
    found: dict[str, Any] = {}
    for name in CHANGED:
        values, base_values = ([getattr(each, name) for each in side] for side in (reports, bases))
        ratios = [value / base if base else None for value, base in zip(values, base_values, strict=True)]
        known = [each for each in ratios if each is not None]
        found[name] = {"median": statistics.median(values), "base": statistics.median(base_values)}
        if known:
            found[name] |= {"ratio": statistics.median(known), "least": min(known), "most": max(known)}
    return found


def show(console: Console, title: str, found: dict[str, Any]) -> None:
    parts = []
    for name in ("latency_p50_s", "latency_p95_s", "throughput", "between_servers_gb"):
        each = found[name]
        if "ratio" in each:
            parts.append(f"{name} {each['ratio']:.3f} ({each['least']:.3f} to {each['most']:.3f})")
    console.print(f"{title}: {'; '.join(parts)}")


def run_all(
    workloads: Sequence[BlockWorkload], cases: dict[str, Callable[[BlockWorkload, str], BlockReport]], console: Console
) -> dict[str, list[BlockReport]]:
    found: dict[str, list[BlockReport]] = {name: [] for name in cases}
    for seed, workload in enumerate(workloads):
        for name, run in cases.items():
            found[name].append(run(workload, name))
        print_block_reports([reports[-1] for reports in found.values()], console, f"a100, seed {seed}")
    return found


def system_case(system: BlockSystem, **settings: Any) -> Callable[[BlockWorkload, str], BlockReport]:
    return lambda workload, name: run_blocks(system, workload, PROFILE, label=name, **settings)


FRAGMENTS = BlockPolicyConfig(placement=PlacementRule.FRAGMENTATION)
SYSTEMS = {str(system): system_case(system) for system in BlockSystem} | {
    "fragmentation": system_case(BlockSystem.BLOCKS, config=FRAGMENTS)
}


def paper_workloads(count: int, sizes: Sizes) -> list[BlockWorkload]:
    return [
        make_workload(count, PROFILE, requests=sizes.requests, duration_s=sizes.duration_s, prompt=300, output=200, seed=seed)
        for seed in range(sizes.seeds)
    ]


def summarise(found: dict[str, list[BlockReport]], pairs: dict[str, tuple[str, str]], console: Console) -> dict[str, Any]:
    changes = {title: change(found[case], found[base]) for title, (case, base) in pairs.items()}
    for title, each in changes.items():
        show(console, title, each)
    runs = {name: [report.to_json(timeline=False) for report in reports] for name, reports in found.items()}
    return {"changes": changes, "runs": runs}


AGAINST = {
    "blocks against per-model": ("blocks", "per-model"),
    "blocks against parameter sharing": ("blocks", "parameter-sharing"),
    "blocks against multi-adapter engines": ("blocks", "multi-adapter"),
    "locality against fragmentation": ("blocks", "fragmentation"),
}


def applications(count: int, sizes: Sizes, folder: Path, console: Console) -> dict[str, Any]:
    """All systems and both placements; both placements again where no whole large model fits a device."""
    workloads = paper_workloads(count, sizes)
    found = run_all(workloads, SYSTEMS, console)
    figures = summarise(found, AGAINST, console)
    small = BlockTopology(memory_bytes=SMALL_MEMORY, servers=(6, 6, 12, 12))
    cut = run_all(
        workloads,
        {
            "blocks, small devices": system_case(BlockSystem.BLOCKS, topology=small),
            "fragmentation, small devices": system_case(BlockSystem.BLOCKS, topology=small, config=FRAGMENTS),
        },
        console,
    )
    pair = {"locality against fragmentation, small devices": ("blocks, small devices", "fragmentation, small devices")}
    on_small = summarise(cut, pair, console)
    merged = {key: figures[key] | on_small[key] for key in figures}
    name = f"zoo-simulation-{count}"
    record = {"script": "zoo_simulation", "paper": PAPER, "profile": PROFILE.to_json(), "seeds": sizes.seeds, **merged}
    path = save(name, QUESTION, record, folder)
    plot_block_reports([found[each][0] for each in SYSTEMS], path.with_suffix(".png"))
    return merged


def kv_rules(sizes: Sizes, folder: Path, console: Console) -> dict[str, Any]:
    """Who goes on with a request, on the paper's workload; and all systems in a cluster that is busier than that."""
    cases = {
        str(rule): system_case(BlockSystem.BLOCKS, config=BlockPolicyConfig(dispatch=DispatchConfig(kv_rule=rule)))
        for rule in KvRule
    }
    pairs = {f"{rule} against owner-first": (str(rule), "owner-first") for rule in (KvRule.RECOMPUTE, KvRule.LEAST_BUSY)}
    rules = summarise(run_all(paper_workloads(20, sizes)[:3], cases, console), pairs, console)
    workloads = [
        make_workload(20, PROFILE, requests=sizes.busy_requests, duration_s=sizes.busy_s, prompt=300, output=100, seed=seed)
        for seed in range(min(3, sizes.seeds))
    ]
    busy = {str(system): system_case(system) for system in BlockSystem}
    busy["blocks, recompute"] = cases["recompute"]
    against = {f"blocks against {system}, busy": ("blocks", system) for system in busy if system != "blocks"}
    figures = {"rules": rules, "busy": summarise(run_all(workloads, busy, console), against, console)}
    save("zoo-simulation-kv", QUESTION, {"script": "zoo_simulation", "paper": PAPER, **figures}, folder)
    return figures


def overloaded(known: Sequence[ZooApplication], rates: dict[str, float], seconds: float, seed: int) -> BlockWorkload:
    """Poisson arrivals at a rate for each application."""
    generator, rows = np.random.default_rng((seed, 3)), []
    for each in known:
        for at in generator.uniform(0, seconds, generator.poisson(rates.get(each.name, 0.0) * seconds)).tolist():
            prompt = int(np.clip(generator.lognormal(np.log(300) - 0.32, 0.8), 1, 768))
            rows.append((at, prompt, min(int(generator.geometric(1 / 100)), 1024 - prompt), each.name))
    rows.sort()
    arrivals, prompts, outputs, names = (list(column) for column in zip(*rows, strict=True))
    return BlockWorkload(list(known), Trace(f"{len(rows)} requests", arrivals, prompts, outputs, names))


def surge_workload(sizes: Sizes, factor: float, seed: int) -> BlockWorkload:
    """20 applications: adapters of the largest model get `factor` times their capacity, other applications half of theirs.

    Capacity is that of the devices with the first block of a chain, shared by load, with batches as large as allowed.
    """
    known = make_applications(20, PROFILE, seed)
    catalog = make_catalog(BlockSystem.BLOCKS, known, PROFILE)
    cluster, _ = provision_cluster(catalog, BlockTopology(), BlockPolicyConfig(), prompt=300, output=100)
    rates: dict[str, float] = {}
    for chain in {each.own.blocks for each in catalog.applications.values()}:
        own = [each for each in known if catalog.applications[each.name].own.blocks == chain]
        cost, weight = PROFILE.models[own[0].foundation].whole, sum(each.weight for each in own)
        row_s = cost.fixed_s / BatchConfig().max_rows + cost.row_s + cost.context_s * 350
        served = len(cluster.instances_of(chain[0])) / (cost.prompt_s(300) + 100 * row_s)
        is_surge = own[0].foundation == list(PROFILE.models)[-1] and own[0].kind != FULL
        rates |= {each.name: (factor if is_surge else 0.5) * served * each.weight / weight for each in own}
    return overloaded(known, rates, sizes.surge_s, seed)


def adaptive_cases() -> dict[str, Callable[[BlockWorkload, str], BlockReport]]:
    """The same placement; only dispatch differs."""
    off = BlockPolicyConfig(dispatch=DispatchConfig(is_adaptive=False))
    return {
        "adaptive": system_case(BlockSystem.BLOCKS, max_loss=MAX_LOSS),
        "own chains": system_case(BlockSystem.BLOCKS, max_loss=MAX_LOSS, config=off),
    }


def overload(sizes: Sizes, folder: Path, console: Console) -> dict[str, Any]:
    """Adaptive serving: the largest model at 1.5 times its capacity, and all applications alike above theirs."""
    seeds, figures = range(min(3, sizes.seeds)), {}
    pair = {"adaptive against own chains": ("adaptive", "own chains")}
    surges = [surge_workload(sizes, 1.5, seed) for seed in seeds]
    even = [
        make_workload(20, PROFILE, requests=sizes.busy_requests, duration_s=sizes.busy_s / 2, prompt=300, output=100, seed=seed)
        for seed in seeds
    ]
    for name, workloads in {"surge of the largest model": surges, "all applications alike": even}.items():
        console.print(name)
        found = run_all(workloads, adaptive_cases(), console)
        figures[name] = summarise(found, pair, console)
        if name.startswith("surge"):
            shown = [found["adaptive"][0], found["own chains"][0]]
            figures[name]["most_loss"] = max(report.most_loss for report in found["adaptive"])
            figures[name]["adaptive_share"] = [report.adaptive / report.requests for report in found["adaptive"]]
    record = {"script": "zoo_simulation", "paper": PAPER, "max_loss": MAX_LOSS, **figures}
    path = save("zoo-simulation-overload", QUESTION, record, folder)
    plot_block_reports(shown, path.with_suffix(".png"))
    return figures


def recorded(traces: Path, sizes: Sizes, folder: Path, console: Console) -> dict[str, Any]:
    """A workload that nothing was chosen on: ServeGen's clients with the lengths of Azure's conversations, day 9."""
    rates, workloads = traces / "servegen_m_large_rates.csv.gz", []
    for seed in range(min(3, sizes.seeds)):
        begin = (9 * 24 + 10 + seed) * 3600.0
        trace = read_trace(
            rates, lengths=traces / "azure_conv.csv.gz", rate_scale=0.2, begin_s=begin, end_s=begin + 20, seed=seed
        )
        workloads.append(workload_of(trace, 20, PROFILE, seed=seed))
    found = run_all(workloads, SYSTEMS, console)
    figures = summarise(found, AGAINST, console)
    save("zoo-simulation-trace", QUESTION, {"script": "zoo_simulation", "paper": PAPER, **figures}, folder)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ("20", "30", "kv", "overload", "trace")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(known)}; none: all but trace")
    parser.add_argument("--traces", type=Path, help="folder of the public traces, for trace")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    console, sizes = Console(width=120), TINY if options.tiny else Sizes()
    chosen = options.cases or known[:-1]
    if not set(chosen) <= set(known) or ("trace" in chosen and options.traces is None):
        parser.error(f"expected cases of {', '.join(known)}, and --traces FOLDER for trace")
    for name in chosen:
        if name == "kv":
            kv_rules(sizes, options.out, console)
        elif name == "overload":
            overload(sizes, options.out, console)
        elif name == "trace":
            recorded(options.traces, sizes, options.out, console)
        elif not options.tiny or name == "20":
            applications(sizes.applications[0] if options.tiny else int(name), sizes, options.out, console)


if __name__ == "__main__":
    main()
