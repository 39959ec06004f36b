"""The index of engines: consistent after any history, and it answers as a search over all engines does."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.cluster.policies.cluster_state import LEVELS, ClusterRequest, ClusterState, EngineStatus, members
from symbiosis.cluster.policies.placement import LargestWorkingSet, LeastLoaded, PowerOfTwo


def request(number: int, prompt: int = 10, *, tenant: str = "t", adapter: str = "", arrival: float = 0.0) -> ClusterRequest:
    return ClusterRequest(number, tenant, adapter, prompt, arrival)


def random_history(seed: int, steps: int = 60) -> ClusterState:
    chance = random.Random(seed)
    state = ClusterState(max_pending_prefill_s=1.0, max_ahead_s=2.0)
    placed: list[ClusterRequest] = []
    for step in range(steps):
        now = step * 0.3
        state.advance(now)
        ready = list(members(state.ready))
        match chance.randrange(6):
            case 0:
                engine = state.add_engine(kv_tokens=1000, max_running=8, now=now)
                state.set_status(engine, EngineStatus.READY, now)
            case 1 if ready and chance.random() < 0.3:
                state.set_status(state.engines[chance.choice(ready)], EngineStatus.DRAINING, now)
            case 2 if placed:
                state.remove(placed.pop(chance.randrange(len(placed))))
            case 3 if placed:
                state.finish_prefill(chance.choice(placed))
            case _ if ready:
                new = request(step)
                state.place(
                    new,
                    state.engines[chance.choice(ready)],
                    prefill_s=chance.random(),
                    reserved=chance.randrange(400),
                    work_s=chance.random(),
                    now=now,
                )
                placed.append(new)
        for engine in list(state.engines.values()):
            if engine.status is EngineStatus.DRAINING and not engine.requests:
                state.set_status(engine, EngineStatus.GONE, now)
        state.check_integrity()
    return state


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_state_is_consistent_after_any_history(seed):
    random_history(seed)


@given(st.integers(0, 10_000), st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_placements_choose_as_a_search_over_all_engines_does(seed, reserved):
    state = random_history(seed)
    levels = state.levels_for(reserved, 1000)
    fitting = [state.engines[number] for number in members(state.open) if levels >> state.engines[number].level & 1]
    fullest, emptiest = (rule.choose(state, state.open, levels) for rule in (LargestWorkingSet(), LeastLoaded()))
    two = PowerOfTwo(seed).choose(state, state.open, levels)
    if not fitting:
        assert fullest == emptiest == two == -1
        return
    assert fullest == max(fitting, key=lambda engine: (engine.level, engine.number)).number
    assert emptiest == min(fitting, key=lambda engine: (engine.level, engine.number)).number
    assert two in [engine.number for engine in fitting]


def test_a_request_that_fits_never_exceeds_the_kv_cache():
    state = ClusterState(max_pending_prefill_s=10)
    engine = state.add_engine(kv_tokens=1000, max_running=100, now=0.0)
    state.set_status(engine, EngineStatus.READY, 0.0)
    for number in range(100):
        if LargestWorkingSet().choose(state, state.open, state.levels_for(70, 1000)) < 0:
            break
        state.place(request(number), engine, prefill_s=0.0, reserved=70)
    assert 0.85 * 1000 <= engine.kv_reserved <= 1000
    assert engine.level < LEVELS


def test_an_engine_with_too_much_work_opens_when_it_is_done():
    state = ClusterState(max_pending_prefill_s=10, max_ahead_s=1.0)
    engine = state.add_engine(kv_tokens=1000, max_running=100, now=0.0)
    state.set_status(engine, EngineStatus.READY, 0.0)
    state.place(request(0), engine, prefill_s=0.1, reserved=10, work_s=3.0, now=0.0)
    state.advance(1.5)
    assert not state.open
    state.advance(2.0)
    assert state.open == engine.bit
