"""One run: a trace, a policy by its name, a report. Every policy starts with the same engines and the same costs."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.policies.placement import PLACEMENTS
from symbiosis.cluster.policies.policy import ClusterControl, ClusterPolicy, PolicyConfig
from symbiosis.cluster.policies.scaling import ScalingConfig, allowed_utilization
from symbiosis.cluster.simulation.baselines import RayServe, RayServeConfig
from symbiosis.cluster.simulation.report import SimulationReport, make_report
from symbiosis.cluster.simulation.simulator import Simulator
from symbiosis.cluster.simulation.trace import Trace, poisson_trace
from symbiosis.cluster.step_cost import StepCost
from symbiosis.errors import BadTrace, UnknownPolicy

POLICIES = ("symbiosis", *PLACEMENTS[1:], "ray-serve:TARGET", "ray-serve-prefix:TARGET", "static:ENGINES")
"""Names of policies. The first is the default; the next ones are it with another placement."""
_FIRST_S = 120.0  # of the trace: what the first engines are ready for


def make_policy(
    name: str,
    cost: StepCost,
    *,
    most_engines: int,
    block_tokens: int = 512,
    seed: int = 0,
    config: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen
) -> ClusterControl:
    """A policy by its name. Raises `UnknownPolicy`."""
    kind, _, argument = name.partition(":")
    if not argument and (kind == "symbiosis" or kind in PLACEMENTS):
        placement = config.placement if kind == "symbiosis" else kind
        scaling = replace(config.scaling, max_engines=min(most_engines, config.scaling.max_engines))
        chosen = replace(config, placement=placement, scaling=scaling, block_tokens=block_tokens)
        return ClusterPolicy(chosen, cost, seed=seed)
    try:
        number = float(argument)
    except ValueError:
        number = math.nan
    if kind not in ("ray-serve", "ray-serve-prefix", "static") or not 0 < number < math.inf:
        raise UnknownPolicy(f"no policy {name!r:.40}: expected one of {', '.join(POLICIES)}")
    settings = RayServeConfig(
        target_ongoing_requests=number,
        max_replicas=most_engines,
        prefix_aware=kind == "ray-serve-prefix",
        autoscale=kind != "static",
    )
    return RayServe(settings, cost, block_tokens=block_tokens, seed=seed)


def first_engines(trace: Trace, cost: StepCost, most_engines: int, scaling: ScalingConfig) -> int:
    """Engines for the first minutes of a trace, the same for every policy that scales."""
    window, work = min(_FIRST_S, trace.duration or 1.0), 0.0
    for at, prompt, output in zip(trace.arrivals, trace.prompts, trace.outputs, strict=True):
        if at > window:
            break
        work += cost.prompt_s(prompt) + cost.completion_s(prompt, output)
    utilization = allowed_utilization(scaling, cost.fixed_s)
    return max(1, min(most_engines, math.ceil(1.2 * work / window / utilization)))


def run_experiment(
    name: str,
    trace: Trace,
    cost: StepCost,
    *,
    most_engines: int,
    objective: Objective = Objective(),  # noqa: B008 - frozen
    fail_every_s: float | None = None,
    seed: int = 0,
    config: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen
) -> SimulationReport:
    """Simulate a policy, aimed at the objective, on a trace. `fail_every_s`: an engine is lost as often."""
    if not len(trace):
        raise BadTrace(f"{trace.name} has no requests")
    config = config.aimed_at(objective)
    policy = make_policy(name, cost, most_engines=most_engines, block_tokens=trace.block_tokens, seed=seed, config=config)
    fixed = name.startswith("static:")
    engines = round(float(name.partition(":")[2])) if fixed else first_engines(trace, cost, most_engines, config.scaling)
    failures = []
    if fail_every_s:
        failures = [at * fail_every_s for at in range(1, int(trace.duration / fail_every_s) + 1)]
    started = time.process_time()
    simulator = Simulator(trace, policy, cost, engines=engines, most_engines=max(most_engines, engines), failures=failures)
    result = simulator.run()
    return make_report(name, result, cost, objective, time.process_time() - started)


def parse_synthetic(text: str, seed: int) -> Trace:
    """`poisson:rate=20,duration=600,prompt=1000,output=200` or `ramp:…`. Raises `BadTrace`."""
    kind, _, options = text.partition(":")
    values = {"rate": 10.0, "duration": 600.0, "prompt": 1000.0, "output": 200.0}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in values or not 0 < number < 1e9:
            raise BadTrace(f"{option!r:.40} is no setting of a synthetic trace: expected {', '.join(values)} above zero")
        values[key] = number
    if values["rate"] * values["duration"] > 1e8:
        raise BadTrace(f"{text!r:.80} has more than 100 million requests")
    trace = poisson_trace(ramp=kind == "ramp", seed=seed, **values)
    if not len(trace):
        raise BadTrace(f"{text!r:.80} has no requests: expected a higher rate, or a longer duration")
    return trace
