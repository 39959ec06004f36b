from __future__ import annotations

import pytest

from symbiosis.finetuning.scheduling.fairness import Candidate
from symbiosis.finetuning.scheduling.step_time_fairness import StepTimeFairness, device_shares, most_delayed


def measured(*points: tuple[int, float]) -> StepTimeFairness:
    fairness = StepTimeFairness()
    for rows, seconds in points:
        for _ in range(5):
            fairness.observe(rows, seconds)
    return fairness


def jobs(*sizes: int) -> list[Candidate]:
    return [Candidate(str(number), f"tenant {number}", 1.0, [rows]) for number, rows in enumerate(sizes)]


def test_rows_are_interpolated_between_measured_sizes():
    fairness = measured((64, 0.008), (4096, 0.088))
    assert fairness.rows_within(1.0, 4096) == 4096
    assert fairness.rows_within(0.048, 4096) == pytest.approx(2080, rel=0.01)
    assert fairness.rows_within(0.004, 4096) == 32
    assert StepTimeFairness().rows_within(0.001, 4096) == 4096, "nothing is measured yet"


def test_passes_that_did_more_than_compute_do_not_count():
    fairness = measured((2048, 0.05))
    fairness.observe(2048, 5.0)
    assert fairness.rows_within(0.05, 4096) == 4096
    assert fairness.rows_within(0.025, 4096) == 1024


def test_only_a_session_smaller_than_its_share_is_delayed():
    assert most_delayed([512] * 8, [1 / 8] * 8, 4096) is None
    assert most_delayed([64, 4096, 4096], [1 / 3] * 3, 4096) == 0
    assert most_delayed([64], [1.0], 4096) is None
    assert most_delayed([], [], 4096) is None
    assert most_delayed([64, 256], [0.2, 0.8], 4096) is None
    assert most_delayed([1024, 512], [0.9, 0.1], 2048) == 0, "the session with the largest share is delayed most"


def test_a_tenant_has_one_share_however_many_sessions_it_opens():
    ann, bob = Candidate("a", "ann", 1.0, [8]), [Candidate(str(n), "bob", 1.0, [8]) for n in range(7)]
    assert device_shares([ann, *bob])[0] == pytest.approx(0.5)
    assert sum(device_shares([ann, *bob])) == pytest.approx(1.0)
    assert device_shares([ann, Candidate("c", "cid", 3.0, [8])]) == pytest.approx([0.25, 0.75])


def test_a_pass_is_no_longer_than_the_smallest_session_takes_alone_on_its_share():
    fairness = measured((64, 0.008), (4096, 0.088))
    among = jobs(64, 1024, 1024, 1024)
    assert fairness.limit(among, 4096) == (among, 1273), "4 × 8 ms"
    assert fairness.limit(jobs(1024, 1024, 1024, 1024), 4096)[1] == 4096
    assert fairness.limit(jobs(64, 2048, 2048), 4096)[1] == 2048 + 64, "examples that fit into one pass stay together"
    assert fairness.limit(jobs(8, 100, 100), 4096)[1] == 4096, "a small pass is not limited"


def test_a_small_session_runs_alone_a_few_times_and_no_more():
    """Also a session whose passes alone have other sizes."""
    fairness, among = StepTimeFairness(), jobs(64, 2048, 2048)
    for _ in range(5):
        assert fairness.limit(among, 4096) == ([among[0]], 4096)
    assert fairness.limit(among, 4096) == (among, 4096)
    fairness.forget("0")
    assert fairness.limit(among, 4096) == ([among[0]], 4096)
    for _ in range(5):
        fairness.observe(64, 0.01)
    assert fairness.limit(among, 4096)[0] == among
