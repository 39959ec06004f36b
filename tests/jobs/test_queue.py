"""Who is next: nobody waits behind another tenant's many jobs."""

from __future__ import annotations

import pytest

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.queue import JobLimits, QueuedJob, crowded, order, startable
from tests.work import lines_run


def of(text: str) -> list[QueuedJob]:
    """`a1 b1`: jobs by tenant, oldest first."""
    return [QueuedJob(word, word[0]) for word in text.split()]


def ids(found: list[QueuedJob]) -> str:
    return " ".join(each.id for each in found)


def test_tenants_take_turns_whoever_came_first():
    assert ids(order(of("a1 a2 a3 b1 c1 b2"), {}, {})) == "a1 b1 c1 a2 b2 a3"


def test_who_has_more_running_waits_for_who_has_fewer():
    assert ids(order(of("a1 a2 b1"), {"a": 2, "b": 1}, {"a": 1, "b": 2})) == "b1 a1 a2"


def test_of_two_with_as_many_the_one_who_waited_longer_goes_first():
    assert ids(order(of("a1 b1"), {}, {"a": 7, "b": 3})) == "b1 a1"
    assert ids(order(of("a1 c1"), {}, {"a": 7})) == "c1 a1"  # never had one


def test_limits_of_all_and_of_each():
    limits = JobLimits(running=3, tenant_running=2)
    ordered = order(of("a1 a2 a3 b1"), {}, {})
    assert ids(startable(ordered, {}, limits)) == "a1 b1 a2"
    assert ids(startable(ordered, {"a": 2}, limits)) == "b1"
    assert ids(startable(ordered, {"a": 1, "c": 2}, limits)) == ""


def test_limits_are_checked():
    with pytest.raises(SymbiosisError, match="running"):
        JobLimits(running=0)


def test_who_has_several_gives_way_to_who_has_none():
    limits = JobLimits(running=4, tenant_running=4)
    assert crowded(of("b1 c1"), {"a": 4}, {}, limits) == ["a", "a"]
    assert crowded(of("b1 c1"), {"a": 4}, {"a": 1}, limits) == ["a"]
    assert crowded(of("b1 c1 d1 e1"), {"a": 4}, {}, limits) == ["a", "a", "a"]  # one stays
    assert crowded(of("c1"), {"a": 1, "b": 3}, {}, limits) == ["b"]
    assert crowded(of("a9 b9"), {"a": 3, "b": 1}, {}, limits) == []  # they have one each
    assert crowded(of("b1"), {"a": 3}, {}, limits) == []  # there is room
    assert crowded(of("e1"), dict.fromkeys("abcd", 1), {}, limits) == []


@pytest.mark.parametrize("jobs", [1_000, 100_000])
def test_putting_in_order_is_as_much_work_for_each_job_however_many_there_are(jobs):
    waiting = [QueuedJob(f"{job}", f"{job % 1000}") for job in range(jobs)]
    assert len(order(waiting, {}, {})) == jobs
    assert lines_run(lambda: order(waiting, {}, {})) < 20 * jobs
