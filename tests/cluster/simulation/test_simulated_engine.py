"""The simulated engine: spans of steps give the times of single steps, and its memory adds up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.cluster.simulation.simulated_engine import SimulatedEngine, SimulatedRequest
from symbiosis.cluster.step_cost import StepCost

COST = StepCost(
    fixed_s=0.01, row_s=1e-4, context_s=1e-6, prefill_s=1e-4, attention_s=1e-8, kv_tokens=20_000, max_rows=600, max_chunk=200
)


def new(number: int, prompt: int, output: int, *, at: float = 0.0, adapter: str = "", blocks: tuple[int, ...] = ()):
    return SimulatedRequest(number, "t", adapter, prompt, at, blocks, output=output)


def run(engine: SimulatedEngine, requests: list[SimulatedRequest]) -> dict[int, tuple[float, float]]:
    """Times of the first and last token by request."""
    found, left = {}, sorted(requests, key=lambda each: each.arrival)
    while left or engine.wake < math.inf:
        if left and left[0].arrival < engine.wake:
            engine.add(left[0], left.pop(0).arrival)
            continue
        now = engine.wake
        for request in engine.advance().finished:
            found[request.id] = (request.first_s, now)
        assert engine.kv_used >= 0
    assert engine.kv_used == engine.context == 0
    return found


def run_by_steps(requests: list[SimulatedRequest]) -> dict[int, tuple[float, float]]:
    """The same one step at a time, as the real scheduler does it."""
    now, found, left = 0.0, {}, sorted(requests, key=lambda each: each.arrival)
    running: list[list[float]] = []  # request, prompt tokens computed, tokens generated
    while left or running:
        if not running and left[0].arrival > now:
            now = left[0].arrival
        while left and left[0].arrival <= now:
            running.append([left.pop(0), 0, 0])
        decoding = [each for each in running if each[2]]
        budget = COST.max_rows - len(decoding)
        seconds = COST.step_s(rows=len(decoding), context=sum(r.prompt + n - 1 for r, _, n in decoding))
        chunks = []
        for each in running:
            if not each[2]:
                count = min(each[0].prompt - each[1], COST.max_chunk, budget)
                budget -= count
                chunks.append((each, count))
                seconds += COST.step_s(prefill=count, before=each[1]) - COST.fixed_s
        now += seconds
        for each in decoding:
            each[2] += 1
        for each, count in chunks:
            each[1] += count
            if each[1] == each[0].prompt:
                each[2], each[0].first_s = 1, now
        for each in [each for each in running if each[2] >= each[0].output]:
            found[each[0].id] = (each[0].first_s, now)
            running.remove(each)
    return found


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_spans_give_the_times_of_single_steps(seed):
    chance = random.Random(seed)
    shapes = [(chance.randint(1, 900), chance.randint(1, 60), chance.uniform(0, 2)) for _ in range(12)]
    spans = run(SimulatedEngine(0, COST, 512), [new(i, p, o, at=t) for i, (p, o, t) in enumerate(shapes)])
    steps = run_by_steps([new(i, p, o, at=t) for i, (p, o, t) in enumerate(shapes)])
    assert spans.keys() == steps.keys()
    for number, (first, last) in steps.items():
        # Chunks of one prompt are taken as equal, so that a span may end up to a chunk earlier or later.
        assert spans[number][0] == pytest.approx(first, abs=0.12)
        assert spans[number][1] == pytest.approx(last, rel=0.05, abs=0.12)


def test_decode_alone_is_exact():
    spans = run(SimulatedEngine(0, COST, 512), [new(number, 100, 50 + number) for number in range(4)])
    steps = run_by_steps([new(number, 100, 50 + number) for number in range(4)])
    for number, times in steps.items():
        assert spans[number] == pytest.approx(times)


def test_without_memory_the_youngest_is_preempted_and_all_finish():
    engine = SimulatedEngine(0, COST, 512)
    found = run(engine, [new(number, 4500, 900, at=number / 100) for number in range(4)])
    assert sorted(found) == [0, 1, 2, 3]
    assert engine.preemptions > 0
    assert found[0][1] < found[3][1]


def test_an_adapter_is_loaded_once_and_delays_its_own_requests_only():
    engine = SimulatedEngine(0, COST, 512)
    found = run(engine, [new(0, 10, 2, adapter="a"), new(1, 10, 2), new(2, 10, 2, adapter="a")])
    assert found[1][0] < COST.adapter_load_s <= found[0][0]
    assert engine.adapter_loads == 1


def test_a_prefix_is_computed_once():
    engine = SimulatedEngine(0, COST, 100)
    first, second = new(0, 1000, 2, blocks=tuple(range(10))), new(1, 1000, 2, at=5.0, blocks=tuple(range(10)))
    found = run(engine, [first, second])
    assert found[1][0] - 5.0 < 0.2 * found[0][0]
    assert second.used == 1


def test_a_cancelled_request_keeps_its_tokens_and_frees_its_memory():
    engine = SimulatedEngine(0, COST, 512)
    long, other = new(0, 100, 500), new(1, 100, 500)
    engine.add(long, 0.0)
    engine.add(other, 0.0)
    engine.advance()
    generated = engine.cancel(long, 1.0)
    assert 0 < generated < 500
    while engine.wake < math.inf:
        engine.advance()
    assert engine.kv_used == engine.context == 0
