"""The sliding-window throughput."""

from __future__ import annotations

import pytest

from symbiosis.common.throughput import Throughput


def test_steps_recorded_in_bursts_give_one_rate():
    rate = Throughput(100.0)
    found = []
    for step in range(1, 401):
        rate.record(50, 100.0 + -(-step // 4) * 0.4)  # four each 0.4 s: 500 per second
        found.append(rate.recent)
    assert all(450 < each < 550 for each in found[40:])
    assert rate.mean == pytest.approx(500)


def test_the_rate_follows_a_change_and_averages_long_steps():
    rate = Throughput(0.0)
    assert rate.recent == rate.mean == 0
    for second in range(1, 101):
        rate.record(10, second)
    for second in range(101, 121):
        rate.record(30, second)
    assert rate.recent == pytest.approx(30)
    assert rate.mean == pytest.approx(1600 / 120)
    slow = Throughput(0.0)
    for step in range(1, 31):
        slow.record(60, -(-step // 2) * 120.0)
    assert 0.8 < slow.recent < 1.2
