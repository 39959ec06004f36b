from __future__ import annotations

import pytest

from symbiosis.training.pace import Pace


def test_a_full_pass_has_all_rows_whatever_was_measured():
    pace = Pace(0.1)
    pace.note(10, 100.0, short=True)
    assert pace.room(4096, short=False) == 4096


def test_a_short_pass_has_as_many_rows_as_take_so_long():
    pace = Pace(0.1)
    assert pace.room(4096, short=True) == 64, "nothing was measured yet"
    pace.note(1000, 1.0, short=False)
    assert pace.room(4096, short=True) == 100
    for _ in range(40):  # short passes are dearer by row
        rows = pace.room(4096, short=True)
        pace.note(rows, 0.02 + 0.001 * rows, short=True)
    assert pace.room(4096, short=True) == pytest.approx(80, abs=2)
    assert pace.room(50, short=True) == 50


def test_there_is_always_room_for_something():
    pace = Pace(0.01)
    pace.note(1, 5.0, short=True)
    assert pace.room(4096, short=True) == 1
