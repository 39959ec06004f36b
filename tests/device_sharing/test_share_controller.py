"""The controller bounds the tail latency of steps, and changes the share rarely."""

from __future__ import annotations

import pytest

from symbiosis.device_sharing.share_controller import ShareController, fit_share, tail_latency

ALONE = [0.005] * 12


def steps(middle: float, slowest: float = 0.0, count: int = 100) -> list[float]:
    """Multiples of the duration alone; three in a hundred are the slowest."""
    return [0.005 * (slowest or middle)] * (3 * count // 100) + [0.005 * middle] * (count - 3 * count // 100)


def test_the_share_fits_the_allowed_slowdown():
    assert fit_share(0.5, slowdown=1.6, max_slowdown=1.3) == 0.25
    assert fit_share(0.5, slowdown=1.4, max_slowdown=1.3) == 0.375
    assert fit_share(0.5, slowdown=1.3, max_slowdown=1.3) == 0.5
    assert fit_share(0.5, slowdown=1.31, max_slowdown=1.3) == 0.5, "a small excess is tolerated"
    assert fit_share(0.375, slowdown=1.25, max_slowdown=1.3) == 0.375, "and a small reserve"
    assert fit_share(0.375, slowdown=1.2, max_slowdown=1.3) == 0.5
    assert fit_share(0.5, slowdown=1.2, max_slowdown=1.3) == 0.75
    assert fit_share(0.5, slowdown=0.9, max_slowdown=1.3) == 0.75, "a bounded change"
    assert fit_share(0.125, slowdown=3.0, max_slowdown=1.1) == 0.125, "training keeps a part"
    assert fit_share(0.125, slowdown=1.01, max_slowdown=1.3) == 0.25, "which grows again"
    assert fit_share(0.875, slowdown=1.0, max_slowdown=1.3) == 0.875, "serving keeps a part"


def test_the_slowest_decode_steps_count_and_prefills_do_not():
    assert tail_latency(steps(1.1)) == pytest.approx(0.0055)
    assert tail_latency(steps(1.1, 1.5)) == pytest.approx(0.0075)
    assert tail_latency([*steps(1.1, 1.5), *[0.03] * 20]) == pytest.approx(0.0075)
    assert tail_latency([0.005]) == 0.005
    controller = ShareController(1.3)
    assert controller.update(steps(1.1, 1.5), ALONE)
    assert controller.share == 0.25
    assert not controller.update([*steps(1.1, 1.3), *[0.05] * 10], ALONE)
    assert controller.share == 0.25


def test_a_share_is_raised_after_more_comparisons_each_time_it_was_too_large():
    controller = ShareController(1.3)
    controller.update(steps(2.0), ALONE)
    assert controller.share == 0.25
    waits = []
    for _ in range(4):
        count = 1
        while not controller.update(steps(1.1), ALONE):
            count += 1
        waits.append(count)
        assert controller.share == 0.375
        assert controller.update(steps(1.5), ALONE)
        assert controller.share == 0.25
    assert waits == [4, 8, 16, 32]


def test_comparisons_that_allow_more_count_in_a_row():
    controller = ShareController(1.3)
    controller.update(steps(2.0), ALONE)
    for _ in range(20):
        for middle in (1.1, 1.1, 1.1, 1.3):
            controller.update(steps(middle), ALONE)
    assert controller.share == 0.25
