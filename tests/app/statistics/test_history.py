from __future__ import annotations

import pytest

from symbiosis.app.statistics.history import GAUGES, RATES, History


def test_totals_become_rates_and_gauges_stay():
    history = History()
    for second, tokens in enumerate((0, 10, 10, 40)):
        history.record(2.0 * second, {"generated_tokens": tokens}, {"running": second})
    found = history.to_json()
    assert found["uptime_s"] == [2, 4, 6]
    assert found["generated_tokens_per_s"] == [5, 0, 15]
    assert found["running"] == [1, 2, 3]
    assert found["trained_tokens_per_s"] == found["waiting"] == [0, 0, 0]


def test_memory_is_bounded_and_the_newest_samples_stay():
    history = History(samples=5)
    for second in range(1000):
        history.record(float(second), {"split_tokens": second * second}, {})
    found = history.to_json()
    assert found["uptime_s"] == [995, 996, 997, 998, 999]
    assert found["split_tokens_per_s"][-1] == 999**2 - 998**2
    assert {len(series) for series in found.values()} == {5}


@pytest.mark.parametrize("totals", [[(0.0, 100), (1.0, 3)], [(0.0, 1), (0.0, 2)]], ids=["a total that restarts", "no time"])
def test_rates_are_never_negative_or_infinite(totals):
    history = History()
    for now, total in totals:
        history.record(now, {"trained_tokens": total}, {})
    assert all(rate == 0 for rate in history.to_json()["trained_tokens_per_s"])


def test_an_empty_history_has_every_series():
    found = History().to_json()
    assert set(found) == {"uptime_s", *(f"{name}_per_s" for name in RATES), *GAUGES}
    assert not any(found.values())
