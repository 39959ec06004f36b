"""The choice of examples for the next pass."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from symbiosis.finetuning.scheduling.fairness import Candidate, Fairness


def waits(session, rows, tenant=None, weight=1.0):
    return Candidate(session, tenant or session, weight, rows)


def test_all_sessions_that_fit_are_picked():
    assert Fairness().pick([waits("a", [4, 4]), waits("b", [8]), waits("c", [2, 2])], 32) == {"a": 2, "b": 1, "c": 2}
    assert Fairness().pick([], 32) == {}


def test_more_pending_examples_gain_no_more_rows():
    fairness, served = Fairness(), Counter()
    for _ in range(20):
        picked = fairness.pick([waits("many", [5] * 50), waits("few", [5] * 10)], 40)
        served.update(picked)
    assert served["many"] == served["few"]


def test_more_sessions_gain_a_tenant_no_more_rows():
    fairness, served = Fairness(), Counter()
    for _ in range(30):
        crowd = [waits(f"a{number}", [5] * 9, "ann") for number in range(5)]
        served.update(fairness.pick([*crowd, waits("b", [5] * 9, "bob")], 20))
    mine = [served[f"a{number}"] for number in range(5)]
    assert sum(mine) == served["b"]
    assert max(mine) - min(mine) <= 1


def test_twice_the_weight_is_twice_the_rows():
    fairness, served = Fairness(), Counter()
    for _ in range(30):
        served.update(fairness.pick([waits("heavy", [5] * 20, weight=2.0), waits("light", [5] * 20)], 30))
    assert served["heavy"] == 2 * served["light"]


def test_idle_time_gains_no_credit():
    fairness = Fairness()
    for _ in range(50):
        fairness.pick([waits("busy", [10] * 4)], 40)
    picked = fairness.pick([waits("busy", [10] * 9), waits("back", [10] * 9)], 40)
    assert picked == {"busy": 2, "back": 2}


def test_work_outside_of_passes_is_charged():
    fairness, served = Fairness(), Counter()
    for _ in range(30):
        fairness.charge("steps", 10.0)
        served.update(fairness.pick([waits("steps", [5] * 9), waits("rows", [5] * 9)], 30))
    assert served["rows"] == 2 * served["steps"]


def test_a_long_example_does_not_starve():
    fairness = Fairness()
    first = fairness.pick([waits("long", [38]), waits("short", [4] * 9)], 40)
    if "long" not in first:
        assert "long" in fairness.pick([waits("long", [38]), waits("short", [4] * 9)], 40)


@given(some.lists(some.lists(some.integers(1, 16), min_size=1, max_size=9), min_size=1, max_size=9), some.integers(16, 64))
def test_every_example_is_computed_once_and_every_pass_fits(batches, max_rows):
    fairness, left = Fairness(), {f"s{number}": list(rows) for number, rows in enumerate(batches)}
    for _ in range(1 + sum(map(len, batches))):
        waiting = [waits(name, rows, tenant=f"t{len(rows) % 3}") for name, rows in left.items() if rows]
        picked = fairness.pick(waiting, max_rows)
        assert bool(picked) == bool(waiting)
        assert sum(sum(left[name][:count]) for name, count in picked.items()) <= max_rows
        for name, count in picked.items():
            assert count >= 1
            del left[name][:count]
    assert not any(left.values())
