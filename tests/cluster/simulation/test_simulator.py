"""The simulator: no request is lost under any policy, whatever fails; the same seed gives the same run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.cluster.policies.cluster_state import ClusterRequest
from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.policies.placement import PLACEMENTS
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig
from symbiosis.cluster.policies.replica_sets import ReplicaConfig
from symbiosis.cluster.policies.scaling import ScalingConfig
from symbiosis.cluster.simulation.baselines import RayServe, RayServeConfig
from symbiosis.cluster.simulation.experiment import make_policy, parse_synthetic, run_experiment
from symbiosis.cluster.simulation.report import make_report
from symbiosis.cluster.simulation.simulator import Simulator
from symbiosis.cluster.simulation.trace import Trace, poisson_trace
from symbiosis.cluster.step_cost import PROFILES, StepCost
from symbiosis.errors import UnknownPolicy

COST = StepCost(
    fixed_s=0.01,
    row_s=2e-5,
    context_s=1e-6,
    prefill_s=1e-4,
    attention_s=1e-9,
    kv_tokens=12_000,
    max_running=16,
    slots=4,
    start_s=10.0,
)
NAMES = ("symbiosis", "largest-working-set", "power-of-two", "ray-serve:4", "ray-serve-prefix:4", "static:3")


def trace(seed: int, rate: float = 6, duration: float = 90) -> Trace:
    return poisson_trace(rate=rate, duration=duration, prompt=400, output=60, seed=seed, ramp=True).with_adapters(12, 1.1, seed)


@given(st.integers(0, 1000), st.sampled_from(NAMES))
@settings(max_examples=25, deadline=None)
def test_no_request_is_lost_whatever_fails(seed, name):
    requests = trace(seed)
    report = run_experiment(name, requests, COST, most_engines=8, fail_every_s=20 if name != "static:3" else None, seed=seed)
    assert report.rejected == sum(
        prompt + output > COST.kv_tokens for prompt, output in zip(requests.prompts, requests.outputs, strict=True)
    )
    assert report.migrations > 0 or name == "static:3"
    assert report.most_engines <= 8
    assert 0 < report.gpu_hours <= 8 * report.hours + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_run(name):
    first, second = (
        run_experiment(name, trace(1), COST, most_engines=6, seed=3).to_json() | {"seconds": 0.0} for _ in range(2)
    )
    assert first == second


PREFIXES = [tuple(range(chat * 100, chat * 100 + 2)) for chat in range(40)]
FIGURES = {  # sums of TTFT and TPOT, engine-seconds, migrations: recorded when adapters began to wait for their engines
    ("least-loaded", False): (65.06828478759296, 11.766651834566963, 341.76044046135564, 10),
    ("least-loaded", True): (59.29579144000374, 11.025563495246375, 341.6835421573557, 12),
    ("largest-working-set", False): (74.98873359608993, 14.074684149417003, 341.76044046135564, 17),
    ("largest-working-set", True): (73.13225803868636, 13.58752834767409, 341.6835421573557, 24),
    ("power-of-two", False): (64.70571190330341, 11.541940034700131, 341.76044046135564, 12),
    ("power-of-two", True): (59.71015889290139, 10.516624584727523, 341.6835421573557, 11),
    ("ray-serve:4", False): (84.82742744574271, 10.278483019091038, 444.6007341022595, 6),
    ("ray-serve:4", True): (67.92521998654327, 9.624622108244946, 444.47257026225947, 6),
    ("ray-serve-prefix:4", False): (84.82742744574271, 10.278483019091038, 444.6007341022595, 6),
    ("ray-serve-prefix:4", True): (62.033122559205445, 10.083333311092739, 444.47257026225947, 9),
}


@pytest.mark.parametrize(("name", "has_prefixes"), list(FIGURES))
def test_runs_give_the_recorded_figures(name, has_prefixes):
    """Engines are lost, and adapters exceed the slots. The number of engines does not depend on scaling."""
    requests = trace(7, rate=9)
    if has_prefixes:
        requests.blocks, requests.block_tokens = [PREFIXES[number % 40] for number in range(len(requests))], 128
    config = PolicyConfig(placement=name, scale=False, block_tokens=requests.block_tokens)
    policy = ClusterPolicy(config, COST) if name in PLACEMENTS else make_policy(name, COST, most_engines=6)
    result = Simulator(requests, policy, COST, engines=5, most_engines=6, failures=[25.0, 50.0]).run()
    found = (sum(result.ttft_s), sum(result.tpot_s), result.engine_s, result.migrations)
    assert found == pytest.approx(FIGURES[name, has_prefixes], rel=1e-9)


def test_the_policy_is_consistent_throughout_a_run():
    config = PolicyConfig(replicas=ReplicaConfig(shrink_after_s=10), scaling=ScalingConfig(max_engines=6, hold_s=10))
    policy = ClusterPolicy(config, COST)

    def check(now: float) -> None:
        policy.state.check_integrity()
        policy.replicas.check_integrity()

    result = Simulator(trace(2), policy, COST, engines=1, most_engines=6, failures=[30.0, 60.0], watch=check).run()
    assert np.isfinite(np.asarray(result.ttft_s)).all()
    assert not policy.queue
    assert policy.state.num_requests == policy.state.kv_reserved == 0


def test_the_objective_is_counted_per_request():
    requests = Trace("t", [0.0, 0.0], [10, 10], [2, 2], ["", ""])
    policy = RayServe(RayServeConfig(autoscale=False), COST)
    result = Simulator(requests, policy, COST, engines=1, most_engines=1).run()
    result.ttft_s[0], result.tpot_s[1] = 1.0, 0.2
    result.ttft_s[1] = 0.5
    report = make_report("p", result, COST, Objective(ttft_s=2, tpot_s=0.1), 0.0)
    assert report.within == 0.5
    assert make_report("p", result, COST, Objective(ttft_s=0.9, tpot_s=0.3), 0.0).within == 0.5
    assert make_report("p", result, COST, Objective(ttft_s=2, tpot_s=0.3), 0.0).within == 1.0


def test_consolidation_leaves_engines_idle_where_the_least_loaded_rule_uses_all():
    requests = poisson_trace(rate=20, duration=60, prompt=200, output=40, seed=0)
    shares = {}
    for placement in ("largest-working-set", "least-loaded"):
        policy = ClusterPolicy(PolicyConfig(placement=placement, scale=False), COST)
        timeline = Simulator(requests, policy, COST, engines=6, most_engines=6).run().timeline
        shares[placement] = np.mean(np.asarray(timeline.batches) == 0)
    assert shares["largest-working-set"] > shares["least-loaded"] + 0.2


def test_engines_follow_the_load_and_leave_after_it():
    calm, busy = poisson_trace(rate=1, duration=300, seed=0), poisson_trace(rate=12, duration=60, prompt=400, output=40, seed=1)
    arrivals = [(at, 100, 20) for at in calm.arrivals]
    arrivals += [
        (at + 60, prompt, output) for at, prompt, output in zip(busy.arrivals, busy.prompts, busy.outputs, strict=True)
    ]
    columns = zip(*sorted(arrivals), strict=True)
    requests = Trace("step", *(list(column) for column in columns), [""] * len(arrivals))
    config = PolicyConfig(scaling=ScalingConfig(max_engines=8, hold_s=30))
    timeline = Simulator(requests, ClusterPolicy(config, COST), COST, engines=1, most_engines=8).run().timeline
    assert timeline.engines[50] == 1
    assert max(timeline.engines) >= 2
    assert timeline.engines[-1] == 1
    changes = np.abs(np.diff(timeline.engines)).sum()
    assert changes <= 2 * max(timeline.engines) + 2, "up once and down once: no storm"


def test_ray_serve_waits_for_its_delays():
    config = RayServeConfig(target_ongoing_requests=2, upscale_delay_s=30, downscale_delay_s=60, look_back_period_s=5)
    policy = RayServe(config, COST)
    policy.engine_ready(policy.add_engine(0.0).number, 0.0)
    requests = []
    for number in range(8):
        request = ClusterRequest(number, "t", "", 10, 0.0)
        policy.submit(request, 0.0)
        requests.append(request)
    starts = [policy.tick(float(second)).start for second in range(32)]
    assert next(index for index, start in enumerate(starts) if start) == 30
    assert starts[30] == 3
    for _ in range(3):
        policy.engine_ready(policy.add_engine(40.0).number, 40.0)
    for request in requests:
        policy.finish(request, 40.0, 5)
    drains = [len(policy.tick(40.0 + second).drained) for second in range(70)]
    assert sum(drains) == 3
    assert min(index for index, drained in enumerate(drains) if drained) >= 60


def test_prefixes_go_to_their_owner():
    blocks = [tuple(range(conversation * 100, conversation * 100 + 8)) for conversation in range(6)]
    count = 120
    requests = Trace(
        "chats",
        [number * 0.5 for number in range(count)],
        [4100] * count,
        [20] * count,
        [""] * count,
        [blocks[number % 6] for number in range(count)],
    )
    cost = PROFILES["h200-7b"]
    owner = run_experiment("symbiosis", requests, cost, most_engines=4)
    assert owner.cached_share > 0.8


@pytest.mark.parametrize("name", ["", "symbiosis:3", "ray-serve", "ray-serve:x", "ray-serve:-1", "static:nan", "other"])
def test_unknown_policies_are_refused(name):
    with pytest.raises(UnknownPolicy, match="expected one of"):
        make_policy(name, COST, most_engines=4)


def test_a_request_larger_than_the_kv_cache_is_rejected():
    requests = Trace("t", [0.0, 1.0], [20_000, 10], [5, 5], ["", ""])
    report = run_experiment("symbiosis", requests, COST, most_engines=2)
    assert report.rejected == 1
    assert report.within == 0.5


def test_synthetic_traces_have_their_rate_and_shape():
    flat, ramp = parse_synthetic("poisson:rate=50,duration=100", 0), parse_synthetic("ramp:rate=50,duration=100", 0)
    assert len(flat) == pytest.approx(5000, rel=0.1)
    middle = [at for at in ramp.arrivals if 40 < at < 60]
    assert len(middle) > 1.5 * len(ramp) * 0.2
    assert flat.arrivals == parse_synthetic("poisson:rate=50,duration=100", 0).arrivals
    assert math.isclose(np.mean(flat.outputs), 200, rel_tol=0.1)
