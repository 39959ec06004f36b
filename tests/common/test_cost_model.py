from __future__ import annotations

import pytest

from symbiosis.common.cost_model import CostModel


def test_a_key_of_one_size_has_no_fixed_part():
    costs = CostModel()
    costs.observe("a", 10, 0.1)
    assert costs.estimate("a", 20) == pytest.approx(0.2)
    assert costs.estimate_saving("a") == 0.0


def test_the_mean_per_row_of_an_unknown_key_is_the_least_of_all():
    costs = CostModel()
    assert costs.seconds_per_row("a") is None
    costs.observe("a", 10, 0.1)
    costs.observe("b", 10, 0.2)
    assert costs.seconds_per_row("b") == pytest.approx(0.02)
    assert costs.seconds_per_row("c") == pytest.approx(0.01)


def test_old_batches_fade():
    costs = CostModel(fade=0.5)
    for seconds in (1.0, *[0.1] * 20):
        costs.observe("a", 10, seconds)
    assert costs.seconds_per_row("a") == pytest.approx(0.01, rel=1e-4)


def test_keys_are_bounded():
    costs = CostModel()
    for number in range(5000):
        costs.observe(number, 1, 1.0)
        costs.set_parts(number, [0])
    assert len(costs._lines) == len(costs._parts) == 4096
