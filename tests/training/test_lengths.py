from __future__ import annotations

import pytest

from symbiosis.training.lengths import Lengths, smallest


def known(*points: tuple[int, float]) -> Lengths:
    lengths = Lengths()
    for rows, seconds in points:
        for _ in range(3):
            lengths.note(rows, seconds)
    return lengths


def test_a_size_is_known_when_it_came_often_enough_and_one_long_pass_does_not_count():
    lengths = Lengths()
    lengths.note(64, 5.0)  # compiled
    lengths.note(64, 0.008)
    assert not lengths.knows(64)
    lengths.note(64, 0.009)
    assert lengths.knows(64)
    assert not lengths.knows(512)
    assert lengths.seconds(64) == pytest.approx(0.009)


def test_as_many_rows_as_take_no_longer():
    lengths = known((64, 0.008), (4096, 0.088))
    assert lengths.rows_within(1.0, 4096) == 4096
    assert lengths.rows_within(0.048, 4096) == pytest.approx(2080, rel=0.01)
    assert lengths.rows_within(0.004, 4096) == 32
    assert Lengths().rows_within(0.001, 4096) == 4096, "nothing is known yet"


def test_only_who_is_small_beside_the_others_is_held_up():
    assert smallest([512] * 8, [1 / 8] * 8, 4096) is None
    assert smallest([64, 4096, 4096], [1 / 3] * 3, 4096) == 0
    assert smallest([64], [1.0], 4096) is None
    assert smallest([], [], 4096) is None
    assert smallest([64, 256], [0.2, 0.8], 4096) is None
    assert smallest([1024, 512], [0.9, 0.1], 2048) == 0, "who has paid for most of the device waits least"
