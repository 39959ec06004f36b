"""Replica sets stay within their bound, grow when hot, and shrink without storms."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.cluster.policies.replica_sets import ReplicaConfig, ReplicaSets

CONFIG = ReplicaConfig(requests_per_replica=4, spare=1, shrink_after_s=100, max_shrinks=2)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_set_grows_beyond_its_bound_in_any_history(seed):
    chance = random.Random(seed)
    sets = ReplicaSets(CONFIG, slots=3)
    running: list[str] = []
    for step in range(120):
        match chance.randrange(5):
            case 0 if running:
                sets.finish(running.pop(chance.randrange(len(running))))
            case 1:
                sets.shrink(float(step * 20))
            case 2 if chance.random() < 0.2:
                sets.drop_engine(chance.randrange(6))
            case _:
                adapter = f"a{chance.randrange(5)}"
                replicas = sets.get(adapter)
                before = replicas.mask.bit_count()
                sets.place(replicas, chance.randrange(6), float(step * 20))
                running.append(adapter)
                after = replicas.mask.bit_count()
                assert after <= sets.bound(replicas) or after <= before
                assert after >= before - 1, "one replica leaves at a time"
        sets.check_integrity()
    assert {name: replicas.running for name, replicas in sets.sets.items() if replicas.running} == {
        name: running.count(name) for name in set(running)
    }


def test_a_hot_adapter_grows_and_a_cold_one_does_not():
    sets = ReplicaSets(CONFIG, slots=8)
    hot, cold = sets.get("hot"), sets.get("cold")
    for number in range(16):
        sets.place(hot, number % 2, 0.0)
    assert sets.is_hot(hot, 8)
    assert not sets.is_hot(hot, 100), "on each of its two engines, it has less than a quarter of what engines run"
    sets.place(cold, 0, 0.0)
    assert not sets.is_hot(cold, 1)
    assert not sets.has_spare(cold)
    sets.place(cold, 1, 0.0)
    assert sets.has_spare(cold)
    assert not sets.is_hot(sets.get("unused"), 0)


def test_sets_shrink_a_few_at_a_time():
    sets = ReplicaSets(CONFIG, slots=64)
    for number in range(20):
        sets.place(sets.get(f"a{number}"), 0, 0.0)
        sets.finish(f"a{number}")
    assert sets.shrink(50.0) == []
    left = []
    for second in range(200, 220):
        dropped = sets.shrink(float(second))
        assert len(dropped) <= 2 if second > 200 else True
        left += dropped
    assert len({adapter for adapter, _ in left}) == 20
    assert not sets.sets
    sets.check_integrity()


def test_a_used_replica_stays():
    sets = ReplicaSets(CONFIG, slots=4)
    replicas = sets.get("a")
    for second in range(0, 400, 50):
        sets.place(replicas, 0, float(second))
        assert sets.shrink(float(second)) == []
    assert replicas.mask == 1
