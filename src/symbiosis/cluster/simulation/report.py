"""Figures of one simulation: GPU-hours, the objective, times to the first and between tokens, adapters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.simulation.simulator import SimulationResult, Timeline
from symbiosis.cluster.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One run. `within` is the share of all requests within the objective."""

    policy: str
    trace: str
    requests: int
    hours: float
    gpu_hours: float
    within: float
    attainable: float
    """Share of requests whose first token an idle engine without prefix cache produces in time."""
    within_of_idle: float
    """Share whose first token comes within the objective of that of an idle engine: for prompts that take longer than it."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    most_engines: int
    engines_started: int
    adapter_loads: int
    cached_share: float
    """Share of prompt tokens that were in a prefix cache."""
    migrations: int
    preemptions: int
    rejected: int
    seconds: float
    """Processor time of the simulation."""
    timeline: Timeline

    def to_json(self, *, timeline: bool = True) -> dict[str, Any]:
        found = asdict(self)
        if not timeline:
            del found["timeline"]
        return found


def make_report(
    policy: str, result: SimulationResult, cost: StepCost, objective: Objective, seconds: float
) -> SimulationReport:
    trace = result.trace
    ttft, tpot = np.asarray(result.ttft_s), np.asarray(result.tpot_s)
    idle = np.asarray([cost.first_token_s(prompt) for prompt in trace.prompts])
    in_pace = tpot <= objective.tpot_s
    finished = np.isfinite(ttft)
    ttft_50, ttft_99 = np.percentile(ttft[finished], [50, 99]) if finished.any() else (0.0, 0.0)
    tpot_50, tpot_99 = np.percentile(tpot[finished], [50, 99]) if finished.any() else (0.0, 0.0)
    return SimulationReport(
        policy=policy,
        trace=trace.name,
        requests=len(trace),
        hours=result.end_s / 3600,
        gpu_hours=result.engine_s / 3600,
        within=float(((ttft <= objective.ttft_s) & in_pace).mean()),
        attainable=float((idle <= objective.ttft_s).mean()),
        within_of_idle=float(((ttft <= objective.ttft_s + idle) & in_pace).mean()),
        ttft_p50_s=float(ttft_50),
        ttft_p99_s=float(ttft_99),
        tpot_p50_s=float(tpot_50),
        tpot_p99_s=float(tpot_99),
        most_engines=result.most_engines,
        engines_started=result.starts,
        adapter_loads=result.adapter_loads,
        cached_share=result.cached_tokens / max(1, sum(trace.prompts)),
        migrations=result.migrations,
        preemptions=result.preemptions,
        rejected=result.rejected,
        seconds=seconds,
        timeline=result.timeline,
    )
