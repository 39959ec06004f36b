"""The number of engines: follows work up at once, down after a hold, and asks once for each engine."""

from __future__ import annotations

import numpy as np
import pytest

from symbiosis.cluster.policies.scaling import (
    ScalingConfig,
    WorkScaling,
    allowed_utilization,
    change_of_engines,
    margin_for_bursts,
)

CONFIG = ScalingConfig(fill=1.0, late_share=1.0, hold_s=30, window_s=10, mean_s=10)


def run(scaling: WorkScaling, work_per_s: float, seconds: int, **state: float) -> list[int]:
    found = []
    for _ in range(seconds):
        for _ in range(10):
            scaling.arrive(work_per_s / 20, work_per_s / 20)
        found.append(scaling.desired(**{"backlog_s": 0.0, "kv_share": 0.0, **state}))
    return found


def test_engines_follow_the_work():
    scaling = WorkScaling(CONFIG, start_s=40, utilization=0.8)
    assert run(scaling, 8.0, 100)[-1] == 10
    assert run(scaling, 16.0, 100)[-1] == 20
    assert scaling.held == 20


def test_engines_leave_after_the_hold_only():
    scaling = WorkScaling(CONFIG, start_s=40, utilization=0.8)
    run(scaling, 8.0, 30)
    run(scaling, 0.08, 29)
    assert scaling.held == 10
    run(scaling, 0.08, 200)
    assert scaling.held == 1


def test_a_director_that_starts_keeps_its_engines():
    scaling = WorkScaling(CONFIG, start_s=40, utilization=0.8)
    need = run(scaling, 0.8, 10)[-1]
    assert change_of_engines(need, scaling.held, ready=8, starting=0) == 0
    run(scaling, 0.8, 20)
    assert change_of_engines(need, scaling.held, ready=8, starting=0) == -7


def arrivals(scaling: WorkScaling, *counts: int) -> list[int]:
    found = []
    for count in counts:
        for _ in range(count):
            scaling.arrive(0.1, 0.1)
        found.append(scaling.desired(backlog_s=0.0, kv_share=0.0))
    return found


def test_a_jump_is_seen_within_seconds_and_chance_is_none():
    steady = arrivals(WorkScaling(CONFIG, start_s=40, utilization=0.8), *[10, 8, 12, 9, 11] * 20)
    assert set(steady[10:]) <= {2, 3, 4}
    scaling = WorkScaling(ScalingConfig(fill=1.0, late_share=1.0), start_s=40, utilization=0.8)
    found = arrivals(scaling, *[10] * 120, *[40] * 8)
    assert found[119] == 3
    assert found[-1] >= 10


def test_a_rise_is_seen_ahead():
    scaling = WorkScaling(ScalingConfig(fill=1.0, late_share=1.0, window_s=60), start_s=40, utilization=0.8)
    found = arrivals(scaling, *[20 + second // 2 for second in range(200)])
    assert found[-1] > 0.2 * 120 / 0.8


def test_one_long_prompt_is_no_rise():
    scaling = WorkScaling(ScalingConfig(fill=1.0, late_share=1.0, mean_s=180), start_s=40, utilization=0.8)
    before = arrivals(scaling, *[10] * 200)[-1]
    scaling.arrive(8.0, 0.0)
    assert arrivals(scaling, 10)[0] <= before + 1


def test_kv_cache_and_backlog_need_engines_too():
    scaling = WorkScaling(CONFIG, start_s=40, utilization=0.8)
    assert run(scaling, 0.0, 1, kv_share=8.5) == [10]
    assert run(scaling, 0.0, 1, backlog_s=80.0) == [10]


def test_bounds_hold():
    scaling = WorkScaling(ScalingConfig(min_engines=2, max_engines=5), start_s=40, utilization=0.8)
    assert set(run(scaling, 0.0, 5)) == {2}
    assert run(scaling, 100.0, 5)[-1] == 5


def test_each_engine_is_asked_for_once():
    assert change_of_engines(10, 10, ready=4, starting=0) == 6
    assert change_of_engines(10, 10, ready=4, starting=6) == 0
    assert change_of_engines(3, 8, ready=10, starting=0) == -2
    assert change_of_engines(3, 3, ready=2, starting=4) == -2


def test_the_objective_bounds_the_utilization():
    config = ScalingConfig(max_utilization=0.9, tpot_s=0.08)
    assert allowed_utilization(config, 0.02) == 0.75
    assert allowed_utilization(config, 0.001) == 0.9
    assert allowed_utilization(config, 1.0) == 0.5


@pytest.mark.parametrize(("rate", "mean_s"), [(20, 0.05), (50, 0.2), (10, 0.5)])
def test_the_margin_for_bursts_keeps_waits_short(rate, mean_s):
    """A queue with exponential work, Poisson arrivals, and the margin as its only spare capacity."""
    generator, work = np.random.default_rng(0), rate * mean_s
    capacity = work + margin_for_bursts(work, rate * 2 * mean_s**2, wait_s=1.0, late_share=0.01)
    work_s, gap_s = generator.exponential(mean_s, 400_000), generator.exponential(1 / rate, 400_000)
    balance = np.cumsum(work_s - capacity * gap_s)
    wait_s = (balance - np.minimum.accumulate(balance)) / capacity
    assert 0.002 < (wait_s > 1.0).mean() < 0.03


def test_short_or_no_work_needs_no_margin():
    assert margin_for_bursts(0.0, 0.0, wait_s=1.0, late_share=0.01) == 0
    assert margin_for_bursts(5.0, 0.02, wait_s=1.0, late_share=0.01) < 0.05
