"""Queue order: a tenant does not wait behind the many jobs of another."""

from __future__ import annotations

import pytest

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.queue import JobLimits, QueuedJob, order_jobs, select_preempted, select_startable
from tests.work import lines_run


def parse_jobs(text: str) -> list[QueuedJob]:
    """`a1 b1`: jobs by tenant, oldest first."""
    return [QueuedJob(word, word[0]) for word in text.split()]


def ids(found: list[QueuedJob]) -> str:
    return " ".join(each.id for each in found)


def test_tenants_alternate_regardless_of_arrival():
    assert ids(order_jobs(parse_jobs("a1 a2 a3 b1 c1 b2"), {}, {})) == "a1 b1 c1 a2 b2 a3"


def test_the_tenant_with_fewer_running_jobs_is_first():
    assert ids(order_jobs(parse_jobs("a1 a2 b1"), {"a": 2, "b": 1}, {"a": 1, "b": 2})) == "b1 a1 a2"


def test_equal_tenants_are_ordered_by_their_last_start():
    assert ids(order_jobs(parse_jobs("a1 b1"), {}, {"a": 7, "b": 3})) == "b1 a1"
    assert ids(order_jobs(parse_jobs("a1 c1"), {}, {"a": 7})) == "c1 a1"  # never had one


def test_total_and_tenant_limits_apply():
    limits = JobLimits(running=3, tenant_running=2)
    ordered = order_jobs(parse_jobs("a1 a2 a3 b1"), {}, {})
    assert ids(select_startable(ordered, {}, limits)) == "a1 b1 a2"
    assert ids(select_startable(ordered, {"a": 2}, limits)) == "b1"
    assert ids(select_startable(ordered, {"a": 1, "c": 2}, limits)) == ""


def test_limits_are_checked():
    with pytest.raises(SymbiosisError, match="running"):
        JobLimits(running=0)


def test_a_tenant_with_several_jobs_is_preempted_for_one_with_none():
    limits = JobLimits(running=4, tenant_running=4)
    assert select_preempted(parse_jobs("b1 c1"), {"a": 4}, {}, limits) == ["a", "a"]
    assert select_preempted(parse_jobs("b1 c1"), {"a": 4}, {"a": 1}, limits) == ["a"]
    assert select_preempted(parse_jobs("b1 c1 d1 e1"), {"a": 4}, {}, limits) == ["a", "a", "a"]  # one job stays
    assert select_preempted(parse_jobs("c1"), {"a": 1, "b": 3}, {}, limits) == ["b"]
    assert select_preempted(parse_jobs("a9 b9"), {"a": 3, "b": 1}, {}, limits) == []  # each has one already
    assert select_preempted(parse_jobs("b1"), {"a": 3}, {}, limits) == []  # below the limit
    assert select_preempted(parse_jobs("e1"), dict.fromkeys("abcd", 1), {}, limits) == []


@pytest.mark.parametrize("jobs", [1_000, 100_000])
def test_ordering_is_linear_in_the_number_of_jobs(jobs):
    waiting = [QueuedJob(f"{job}", f"{job % 1000}") for job in range(jobs)]
    assert len(order_jobs(waiting, {}, {})) == jobs
    assert lines_run(lambda: order_jobs(waiting, {}, {})) < 20 * jobs
