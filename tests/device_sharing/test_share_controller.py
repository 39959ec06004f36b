"""A part of the GPU that lets even the slowest tokens come in time, and does not change for nothing."""

from __future__ import annotations

import pytest

from symbiosis.device_sharing.share_controller import ShareController, fitting, tail

ALONE = [0.005] * 12


def passes(middle: float, slowest: float = 0.0, count: int = 100) -> list[float]:
    """Times what they take alone; three in a hundred are the slowest."""
    return [0.005 * (slowest or middle)] * (3 * count // 100) + [0.005 * middle] * (count - 3 * count // 100)


def test_a_part_is_found_that_slows_answers_as_much_as_is_allowed():
    assert fitting(0.5, slower=1.6, allowed=1.3) == 0.25
    assert fitting(0.5, slower=1.4, allowed=1.3) == 0.375
    assert fitting(0.5, slower=1.3, allowed=1.3) == 0.5
    assert fitting(0.5, slower=1.31, allowed=1.3) == 0.5, "not less for next to nothing"
    assert fitting(0.375, slower=1.25, allowed=1.3) == 0.375, "nor more"
    assert fitting(0.375, slower=1.2, allowed=1.3) == 0.5
    assert fitting(0.5, slower=1.2, allowed=1.3) == 0.75
    assert fitting(0.5, slower=0.9, allowed=1.3) == 0.75, "not too much at a time"
    assert fitting(0.125, slower=3.0, allowed=1.1) == 0.125, "some training goes on"
    assert fitting(0.125, slower=1.01, allowed=1.3) == 0.25, "and from there it gets more again"
    assert fitting(0.875, slower=1.0, allowed=1.3) == 0.875, "serving has some to itself"


def test_the_slowest_tokens_count_and_prompts_do_not():
    assert tail(passes(1.1)) == pytest.approx(0.0055)
    assert tail(passes(1.1, 1.5)) == pytest.approx(0.0075)
    assert tail([*passes(1.1, 1.5), *[0.03] * 20]) == pytest.approx(0.0075)
    assert tail([0.005]) == 0.005
    steering = ShareController(1.3)
    assert steering.compare(passes(1.1, 1.5), ALONE)
    assert steering.share == 0.25
    assert not steering.compare([*passes(1.1, 1.3), *[0.05] * 10], ALONE)
    assert steering.share == 0.25


def test_a_larger_part_is_tried_after_some_comparisons_and_after_more_each_time_it_was_too_large():
    steering = ShareController(1.3)
    steering.compare(passes(2.0), ALONE)
    assert steering.share == 0.25
    waits = []
    for _ in range(4):
        count = 1
        while not steering.compare(passes(1.1), ALONE):
            count += 1
        waits.append(count)
        assert steering.share == 0.375
        assert steering.compare(passes(1.5), ALONE)
        assert steering.share == 0.25
    assert waits == [4, 8, 16, 32]


def test_comparisons_that_allow_more_count_in_a_row():
    steering = ShareController(1.3)
    steering.compare(passes(2.0), ALONE)
    for _ in range(20):
        for middle in (1.1, 1.1, 1.1, 1.3):
            steering.compare(passes(middle), ALONE)
    assert steering.share == 0.25
