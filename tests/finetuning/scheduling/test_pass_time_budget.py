from __future__ import annotations

import math

import pytest

from symbiosis.finetuning.scheduling.pass_time_budget import PassTimeBudget


def test_without_a_budget_a_pass_has_all_rows():
    budget = PassTimeBudget()
    budget.observe("full", 10, 100.0)
    assert budget.max_rows(4096, "full", math.inf) == 4096


def test_a_short_pass_has_as_many_rows_as_fit_into_the_budget():
    budget = PassTimeBudget()
    assert budget.max_rows(4096, "short", 0.1) == 64, "nothing is measured yet"
    budget.observe("full", 1000, 1.0)
    assert budget.max_rows(4096, "short", 0.1) == 100
    for _ in range(40):  # a row of a short pass takes longer
        rows = budget.max_rows(4096, "short", 0.1)
        budget.observe("short", rows, 0.02 + 0.001 * rows)
    assert budget.max_rows(4096, "short", 0.1) == pytest.approx(80, abs=2)
    assert budget.max_rows(50, "short", 0.1) == 50


def test_a_pass_has_at_least_one_row():
    budget = PassTimeBudget()
    budget.observe("short", 1, 5.0)
    assert budget.max_rows(4096, "short", 0.01) == 1
