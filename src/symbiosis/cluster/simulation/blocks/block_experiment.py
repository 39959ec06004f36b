"""One run: a trace of applications, a system by its name, a report. All systems have the same costs, devices and limits."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from symbiosis.cluster.policies.blocks.block_cost import BlockProfile
from symbiosis.cluster.policies.blocks.block_policy import BlockPolicyConfig
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.cluster.simulation.blocks.applications import BlockSystem, ZooApplication, make_applications, make_catalog
from symbiosis.cluster.simulation.blocks.block_report import BlockReport, make_block_report
from symbiosis.cluster.simulation.blocks.block_simulator import BlockSimulator
from symbiosis.cluster.simulation.trace import Trace
from symbiosis.errors import BadTrace, UnknownPolicy

MAX_TOKENS = 1024
"""Longest sequence, as in the paper."""


@dataclass(frozen=True, slots=True)
class BlockWorkload:
    """Requests of applications."""

    applications: list[ZooApplication]
    trace: Trace
    """The adapter of a request names its application."""


def make_workload(
    count: int, profile: BlockProfile, *, requests: int, duration_s: float, prompt: float, output: float, seed: int
) -> BlockWorkload:
    """The paper's: applications of uniform popularity with Poisson arrivals. Raises `BadTrace`.

    The paper does not say how long requests are: prompts are log-normal and completions geometric here.
    """
    if count < 1 or requests < 1:
        raise BadTrace("a workload needs an application and a request")
    applications = make_applications(count, profile, seed)
    generator = np.random.default_rng((seed, 1))
    weights = np.asarray([each.weight for each in applications])
    chosen = generator.choice(count, size=requests, p=weights / weights.sum()).tolist()
    arrivals = np.sort(generator.uniform(0, duration_s, requests)).tolist()
    prompts = np.clip(generator.lognormal(np.log(prompt) - 0.32, 0.8, requests), 1, MAX_TOKENS * 3 // 4).astype(int)
    outputs = np.minimum(generator.geometric(1 / max(1.0, output), requests), MAX_TOKENS - prompts)
    names = [applications[each].name for each in chosen]
    trace = Trace(f"{requests} requests", arrivals, prompts.tolist(), outputs.tolist(), names)
    return BlockWorkload(applications, trace)


def workload_of(trace: Trace, count: int, profile: BlockProfile, *, seed: int) -> BlockWorkload:
    """Arrivals and lengths of a trace, cut to the longest sequence; requests of its tenants, or random ones, by application."""
    applications = make_applications(count, profile, seed)
    generator = np.random.default_rng((seed, 2))
    tenants = sorted(set(trace.adapters))
    if len(tenants) > 1:
        of_tenant = dict(zip(tenants, generator.integers(0, count, len(tenants)).tolist(), strict=True))
        chosen = [of_tenant[each] for each in trace.adapters]
    else:
        weights = np.asarray([each.weight for each in applications])
        chosen = generator.choice(count, size=len(trace), p=weights / weights.sum()).tolist()
    prompts = [min(each, MAX_TOKENS * 3 // 4) for each in trace.prompts]
    outputs = [min(output, MAX_TOKENS - prompt) for prompt, output in zip(prompts, trace.outputs, strict=True)]
    names = [applications[each].name for each in chosen]
    return BlockWorkload(applications, Trace(trace.name, trace.arrivals, prompts, outputs, names))


def parse_system(name: str) -> BlockSystem:
    """Raises `UnknownPolicy`."""
    try:
        return BlockSystem(name)
    except ValueError:
        raise UnknownPolicy(f"no system {name!r:.40}: expected one of {', '.join(BlockSystem)}") from None


def run_blocks(
    system: BlockSystem,
    workload: BlockWorkload,
    profile: BlockProfile,
    *,
    topology: BlockTopology = BlockTopology(),  # noqa: B008 - frozen
    config: BlockPolicyConfig = BlockPolicyConfig(),  # noqa: B008 - frozen
    max_loss: float = 0.0,
    label: str = "",
) -> BlockReport:
    """Simulate a system. `max_loss`: every tenant's bound for equivalent chains. Raises `DoesNotFit`."""
    catalog = make_catalog(system, workload.applications, profile, max_loss=max_loss)
    started = time.process_time()
    run = BlockSimulator(workload.trace, catalog, topology, config).run()
    return make_block_report(
        label or str(system),
        workload.trace,
        run,
        applications=len(workload.applications),
        devices=topology.num_devices,
        seconds=time.process_time() - started,
    )
