from __future__ import annotations

import math

import pytest

from symbiosis.finetuning.scheduling.pass_time_budget import PassTimeBudget


def test_a_full_pass_has_all_rows_whatever_was_measured():
    pace = PassTimeBudget()
    pace.note("full", 10, 100.0)
    assert pace.room(4096, "full", math.inf) == 4096


def test_a_short_pass_has_as_many_rows_as_take_so_long():
    pace = PassTimeBudget()
    assert pace.room(4096, "short", 0.1) == 64, "nothing was measured yet"
    pace.note("full", 1000, 1.0)
    assert pace.room(4096, "short", 0.1) == 100
    for _ in range(40):  # short passes are dearer by row
        rows = pace.room(4096, "short", 0.1)
        pace.note("short", rows, 0.02 + 0.001 * rows)
    assert pace.room(4096, "short", 0.1) == pytest.approx(80, abs=2)
    assert pace.room(50, "short", 0.1) == 50


def test_there_is_always_room_for_something():
    pace = PassTimeBudget()
    pace.note("short", 1, 5.0)
    assert pace.room(4096, "short", 0.01) == 1
