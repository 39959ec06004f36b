"""Fairness of the scheduler over tenants: shares by weight, bounded waits. See simulated_engine.py."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.scheduling.simulated_engine import SimulatedEngine, rows


class TestFairness:
    def flood(self, engine, tenant="flood", number=200, **changes):
        for each in range(number):
            engine.add(f"{tenant}{each}", tenant=tenant, prompt=[each % 32, each // 32, 3, 4], max_tokens=8, **changes)

    def test_a_flood_does_not_delay_another_tenant(self):
        engine = SimulatedEngine(max_running=4, tenant_running=4)
        self.flood(engine)
        for _ in range(20):
            engine.step()
        engine.add("b", tenant="bob")
        engine.step()
        while "b" not in engine.admitted:
            engine.step()
        assert engine.admitted["b"] - engine.added["b"].arrival <= 8  # the next sequence to finish frees a slot

    def test_shares_follow_weights(self):
        engine = SimulatedEngine(max_running=6, max_rows=32, max_wait_s=1e6)
        self.flood(engine, "a", 300, weight=3.0)
        self.flood(engine, "b", 300, weight=1.0)
        for _ in range(300):
            engine.step()
        done = [sum(one.tenant == tenant for one in engine.ended.values()) for tenant in "ab"]
        assert done[0] / done[1] == pytest.approx(3.0, rel=0.15)

    def test_idle_time_earns_no_credit(self):
        engine = SimulatedEngine(max_running=4)
        self.flood(engine, "a", 100)
        for _ in range(100):
            engine.step()
        self.flood(engine, "b", 100)
        engine.step()
        assert engine.scheduler.counter("b") >= engine.scheduler.counter("a") / 2
        start = len(engine.ended)
        for _ in range(100):
            engine.step()
        later = list(engine.ended.values())[start:]
        assert sum(one.tenant == "a" for one in later) >= len(later) * 0.4

    def test_the_least_weight_does_not_starve(self):
        engine = SimulatedEngine(max_running=4, max_wait_s=30)
        self.flood(engine, "heavy", 600, weight=1000.0)
        engine.add("light", tenant="light", weight=0.001)
        for _ in range(45):
            engine.step()
        assert engine.admitted["light"] <= 30 + 10

    def test_many_tenants_that_waited_too_long_are_all_served(self):
        engine = SimulatedEngine(max_running=2, max_wait_s=5)
        self.flood(engine, "flood", 400)
        for tenant in range(20):
            engine.add(f"t{tenant}", tenant=f"t{tenant}", max_tokens=8)
        for _ in range(150):
            engine.step()
        assert all(f"t{tenant}" in engine.ended for tenant in range(20))

    def test_a_large_prompt_gets_its_blocks_under_a_stream_of_small_ones(self):
        engine = SimulatedEngine(num_blocks=16, block_size=4, max_wait_s=10)
        self.flood(engine, "small", 20)
        engine.step()
        engine.add("large", tenant="large", prompt=[7] * 50, max_tokens=4)
        for number in range(60):
            engine.add(f"more{number}", tenant="small", prompt=[number % 32, 1, 2], max_tokens=8)
            engine.step()
        assert "large" in engine.ended

    def test_a_prompt_without_free_blocks_does_not_block_smaller_ones(self):
        engine = SimulatedEngine(num_blocks=16, block_size=4, max_wait_s=1e6)
        engine.add("runs", prompt=[1] * 20, max_tokens=20)
        engine.step()
        engine.add("large", tenant="large", prompt=[7] * 50, max_tokens=4)
        engine.add("small", tenant="small", prompt=[8] * 4, max_tokens=4)
        assert set(rows(engine.step())) == {"runs", "small"}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_under_any_flood_the_wait_is_bounded(seed):
    rng = random.Random(seed)
    engine = SimulatedEngine(num_blocks=12, block_size=4, max_running=4, max_rows=12, max_wait_s=10, max_adapters=2)
    quiet = 0
    for step in range(200):
        for _ in range(2):
            engine.add(
                f"f{step}-{rng.random()}", tenant="flood", prompt=[rng.randrange(32) for _ in range(rng.randrange(1, 9))],
                max_tokens=rng.randrange(1, 9), adapter=rng.choice(["", "x", "y"]), weight=4.0,
            )  # fmt: skip
        if step % 20 == 10:
            engine.add(
                f"q{quiet}", tenant="quiet", prompt=[5] * rng.randrange(1, 30), max_tokens=4, adapter=rng.choice(["", "z"])
            )
            quiet += 1
        engine.step()
    waits = [engine.admitted.get(f"q{i}", engine.now) - engine.added[f"q{i}"].arrival for i in range(quiet)]
    assert max(waits) <= 10 + 60
