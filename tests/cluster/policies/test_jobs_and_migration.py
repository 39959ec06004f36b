"""Jobs next to serving, and the choice of engines and requests that leave."""

from __future__ import annotations

from symbiosis.cluster.policies.cluster_state import ClusterState, EngineStatus
from symbiosis.cluster.policies.job_placement import ClusterJob, JobConfig, JobPolicy, jobs_to_move, place_job
from symbiosis.cluster.policies.migration import MigrationConfig, choose_drains, estimate_consolidation, leaving
from tests.cluster.policies.test_cluster_state import request


def cluster(*loads: int) -> ClusterState:
    """Engines of 10 sequences, with so many requests."""
    state = ClusterState(max_pending_prefill_s=10)
    for load in loads:
        engine = state.add_engine(kv_tokens=1000, max_running=10, now=0.0)
        state.set_status(engine, EngineStatus.READY, 0.0)
        for number in range(load):
            state.place(request(100 * engine.number + number, 10 + number), engine, prefill_s=0.0, reserved=10)
    return state


def test_a_job_goes_where_serving_leaves_room():
    job, config = ClusterJob("j", 300), JobConfig()
    assert place_job(job, cluster(9, 3, 0), {}, config) == 1
    assert place_job(job, cluster(9, 8), {}, config) is None
    assert place_job(ClusterJob("big", 990), cluster(3, 0), {}, config) == 1
    assert place_job(job, cluster(3, 0), {1: [ClusterJob("k", 10)], 0: [ClusterJob("l", 10)]}, config) == 0
    assert place_job(job, cluster(0), {0: [ClusterJob("k", 800)]}, config) is None


def test_jobs_leave_a_full_engine_one_by_one_and_a_lost_one_at_once():
    jobs = {0: [ClusterJob("a", 30), ClusterJob("b", 20)], 7: [ClusterJob("c", 10)]}
    moved = jobs_to_move(cluster(10), jobs, JobConfig())
    assert [job.id for job in moved] == ["b", "c"]
    assert [job.id for job in jobs_to_move(cluster(5), jobs, JobConfig())] == ["c"]


def test_a_job_waits_for_room_and_starts_at_any_load_at_last():
    policy, state = JobPolicy(JobConfig(max_wait_s=300)), cluster(9, 8)
    job = ClusterJob("j", 0)
    for now in range(0, 300, 5):
        assert policy.place(job, state, {}, {0, 1}, float(now)) is None
    assert policy.num_waiting == 1
    number, placed = policy.place(job, state, {}, {0, 1}, 300.0)
    assert number == 1
    assert placed.is_overdue
    assert policy.num_waiting == 0
    full = cluster(10, 10)
    assert [policy.tick(full, {1: [placed]}, now) for now in (301.0, 400.0)] == [[], []]  # load does not move it
    full.set_status(full.engines[1], EngineStatus.DRAINING, 400.0)
    assert policy.tick(full, {1: [placed]}, 401.0) == [placed]


def test_a_job_that_is_not_asked_for_again_does_not_wait():
    policy, state = JobPolicy(JobConfig(max_wait_s=300)), cluster(9)
    assert policy.place(ClusterJob("j", 0), state, {}, {0}, 0.0) is None
    assert policy.place(ClusterJob("j", 0), state, {}, {0}, 400.0) is None  # its wait begins again
    policy.tick(state, {}, 500.0)
    assert policy.num_waiting == 0


def test_jobs_go_only_where_engines_train():
    policy, state = JobPolicy(JobConfig()), cluster(1, 0)
    assert policy.place(ClusterJob("j", 0), state, {}, {1}, 0.0) == (1, ClusterJob("j", 0))
    assert policy.place(ClusterJob("j", 0), state, {}, set(), 0.0) is None


def test_a_job_leaves_an_engine_that_stays_full_for_some_time():
    policy, full, idle = JobPolicy(JobConfig(evict_after_s=10)), cluster(10), cluster(2)
    jobs = {0: [ClusterJob("a", 30), ClusterJob("b", 20)]}
    assert policy.tick(full, jobs, 0.0) == []
    assert policy.tick(idle, jobs, 5.0) == []
    assert policy.tick(full, jobs, 6.0) == []
    assert policy.tick(full, jobs, 15.0) == []
    assert [job.id for job in policy.tick(full, jobs, 16.0)] == ["b"]
    rest = {0: [ClusterJob("a", 30)]}
    assert [policy.tick(full, rest, now) for now in (17.0, 26.0)] == [[], []]
    assert [job.id for job in policy.tick(full, rest, 27.0)] == ["a"]


def test_the_emptiest_engines_drain_first():
    assert [engine.number for engine in choose_drains(cluster(5, 0, 3, 0), 3)] == [1, 3, 2]
    assert choose_drains(cluster(1), 0) == []


def test_a_draining_engine_hands_over_after_its_time_the_cheapest_first():
    state, config = cluster(5), MigrationConfig(drain_s=15, most_at_once=2)
    engine = state.engines[0]
    assert leaving(engine, 100.0, config) == []
    state.set_status(engine, EngineStatus.DRAINING, 100.0)
    assert leaving(engine, 110.0, config) == []
    assert [each.prompt for each in leaving(engine, 115.0, config)] == [10, 11]


def test_consolidation_pays_for_long_answers_only():
    requests = list(cluster(5).engines[0].requests.values())
    assert not estimate_consolidation(requests, prefill_s=0.1, remaining_s=5.0).pays
    assert estimate_consolidation(requests, prefill_s=0.01, remaining_s=60.0).pays
