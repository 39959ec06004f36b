from __future__ import annotations

import pytest

from symbiosis.finetuning.scheduling.fairness import Candidate
from symbiosis.finetuning.scheduling.step_time_fairness import StepTimeFairness, shares_of, smallest


def known(*points: tuple[int, float]) -> StepTimeFairness:
    lengths = StepTimeFairness()
    for rows, seconds in points:
        for _ in range(5):
            lengths.note(rows, seconds)
    return lengths


def jobs(*sizes: int) -> list[Candidate]:
    return [Candidate(str(number), f"tenant {number}", 1.0, [rows]) for number, rows in enumerate(sizes)]


def test_as_many_rows_as_take_no_longer():
    lengths = known((64, 0.008), (4096, 0.088))
    assert lengths.rows_within(1.0, 4096) == 4096
    assert lengths.rows_within(0.048, 4096) == pytest.approx(2080, rel=0.01)
    assert lengths.rows_within(0.004, 4096) == 32
    assert StepTimeFairness().rows_within(0.001, 4096) == 4096, "nothing is known yet"


def test_passes_that_did_more_than_compute_do_not_count():
    lengths = known((2048, 0.05))
    lengths.note(2048, 5.0)
    assert lengths.rows_within(0.05, 4096) == 4096
    assert lengths.rows_within(0.025, 4096) == 1024


def test_only_who_is_small_beside_the_others_is_held_up():
    assert smallest([512] * 8, [1 / 8] * 8, 4096) is None
    assert smallest([64, 4096, 4096], [1 / 3] * 3, 4096) == 0
    assert smallest([64], [1.0], 4096) is None
    assert smallest([], [], 4096) is None
    assert smallest([64, 256], [0.2, 0.8], 4096) is None
    assert smallest([1024, 512], [0.9, 0.1], 2048) == 0, "who has paid for most of the device waits least"


def test_a_tenant_has_one_share_however_many_sessions_it_opens():
    ann, bob = Candidate("a", "ann", 1.0, [8]), [Candidate(str(n), "bob", 1.0, [8]) for n in range(7)]
    assert shares_of([ann, *bob])[0] == pytest.approx(0.5)
    assert sum(shares_of([ann, *bob])) == pytest.approx(1.0)
    assert shares_of([ann, Candidate("c", "cid", 3.0, [8])]) == pytest.approx([0.25, 0.75])


def test_a_pass_is_no_longer_than_the_smallest_would_take_alone_on_its_share():
    lengths = known((64, 0.008), (4096, 0.088))
    among = jobs(64, 1024, 1024, 1024)
    assert lengths.fair(among, 4096) == (among, 1273), "4 × 8 ms"
    assert lengths.fair(jobs(1024, 1024, 1024, 1024), 4096)[1] == 4096
    assert lengths.fair(jobs(64, 2048, 2048), 4096)[1] == 2048 + 64, "nobody is parted who could share a pass"
    assert lengths.fair(jobs(8, 100, 100), 4096)[1] == 4096, "so few are not cut"


def test_a_small_one_is_tried_by_itself_a_few_times_and_no_more():
    """Also one that never comes with the rows it was tried for."""
    lengths, among = StepTimeFairness(), jobs(64, 2048, 2048)
    for _ in range(5):
        assert lengths.fair(among, 4096) == ([among[0]], 4096)
    assert lengths.fair(among, 4096) == (among, 4096)
    lengths.forget("0")
    assert lengths.fair(among, 4096) == ([among[0]], 4096)
    for _ in range(5):
        lengths.note(64, 0.01)
    assert lengths.fair(among, 4096)[0] == among
