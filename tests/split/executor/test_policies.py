"""Policies are pure: they see a queue and a time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.common.cost_model import CostModel
from symbiosis.split.executor.policies import Lockstep, NoBatching, Opportunistic
from symbiosis.split.executor.sessions import BatchKey, PendingCall, Session
from symbiosis.types import Direction

Q = BatchKey((0,), Direction.FORWARD, ("q",))
FAR = BatchKey((500,), Direction.FORWARD, ("far",))
MLP = BatchKey((5,), Direction.FORWARD, ("mlp",))
Q_BACK = BatchKey((0,), Direction.BACKWARD, ("q",))


def session(last_seen, key=None, **fields) -> Session:
    """A session that was last active at `last_seen`, with forward passes of 0.1 s that need all of the GPU."""
    defaults = {"rows": 1, "last_pass_cost_s": 0.1, "last_pass_calls": 100, "mean_pass_s": 0.1, "replied": last_seen}
    return Session(0, "ann", None, last_seen, key=key, **{**defaults, **fields})


def call(number, session=None, key=Q, rows=1, training=False, arrived=0.0):
    return PendingCall(number, session or number, key, rows, training, arrived)


def async_call(number, session=None, key=Q, rows=1, arrived=0.0):
    return PendingCall(number, session or number, key, rows, training=False, arrived=arrived, is_async=True)


def known_costs(fixed=0.010, per_row=1e-5, shapes=("q", "mlp")):
    costs = CostModel()
    for shape in shapes:
        for rows in (1, 100, 1000):
            costs.observe((shape,), rows, fixed + per_row * rows)
    return costs


def sessions(*numbers, at=0.0):
    return dict.fromkeys(numbers, session(at))


def numbers(decision):
    return [c.number for c in decision.batch]


def test_an_empty_queue_waits_for_a_message():
    for policy in (NoBatching(), Lockstep(), Opportunistic()):
        decision = policy.decide([], {}, CostModel(), 0.0)
        assert not decision.batch
        assert decision.next_decision_at is None


def test_none_runs_each_call_alone_in_order_of_arrival():
    calls = [call(2), call(1), call(3)]
    assert numbers(NoBatching().decide(calls, sessions(1, 2, 3), CostModel(), 0.0)) == [1]


class TestLockstep:
    def test_it_waits_for_every_active_session_but_not_for_ever(self):
        policy = Lockstep(max_wait_s=1.0)
        waiting = policy.decide([call(1)], sessions(1, 2), CostModel(), 0.5)
        assert not waiting.batch
        assert waiting.next_decision_at == 1.0
        assert numbers(policy.decide([call(1)], sessions(1, 2), CostModel(), 1.0)) == [1]

    def test_a_silent_session_is_not_waited_for(self):
        assert numbers(
            Lockstep(max_wait_s=1.0).decide([call(1, arrived=5.0)], {1: session(5.0), 2: session(1.0)}, CostModel(), 5.0)
        ) == [1]

    def test_all_calls_of_the_layer_furthest_behind_share_a_batch(self):
        calls = [call(1, key=MLP), call(2), call(3, key=Q_BACK), call(4)]
        assert numbers(Lockstep().decide(calls, sessions(1, 2, 3, 4), CostModel(), 0.0)) == [2, 4]


class TestOpportunistic:
    def test_a_small_call_does_not_wait(self):
        assert numbers(Opportunistic().decide([call(1)], sessions(1, 2, 3), known_costs(), 0.0)) == [1]

    def test_a_call_with_mostly_fixed_cost_is_small(self):
        cheap = known_costs(fixed=0.010, per_row=1e-6)
        large = call(1, rows=2560, key=MLP)
        ahead = call(3, rows=1, key=FAR)
        assert numbers(Opportunistic().decide([ahead, large], sessions(1, 3), cheap, 0.0)) == [1]
        assert numbers(Opportunistic().decide([ahead, large], sessions(1, 3), known_costs(), 0.0)) == [3]

    def test_a_small_call_does_not_share_a_batch_with_a_large_one(self):
        calls = [call(1, rows=4096), call(2, rows=1), call(3, rows=2)]
        assert numbers(Opportunistic().decide(calls, sessions(1, 2, 3), known_costs(), 0.0)) == [2, 3]

    def test_inference_runs_before_training(self):
        calls = [call(1, rows=500, training=True, key=MLP), call(2, rows=500)]
        assert numbers(Opportunistic().decide(calls, sessions(1, 2), known_costs(), 0.0)) == [2]

    def test_training_pauses_while_a_session_decodes(self):
        training = call(1, session=1, rows=500, training=True, key=MLP, arrived=1.0)
        sessions = {1: session(1.0, Q_BACK, is_training=True, last_run=0.99, busy_s=0.01), 2: session(0.999, Q)}
        policy = Opportunistic(training_share=0.25)
        decision = policy.decide([training], sessions, CostModel(), 1.0)
        assert not decision.batch
        assert decision.next_decision_at == pytest.approx(0.99 + 0.01 / 0.25)
        assert numbers(policy.decide([training], sessions, CostModel(), 1.04)) == [1]
        assert numbers(policy.decide([training, call(2, key=Q, arrived=1.0)], sessions, CostModel(), 1.0)) == [2]
        assert numbers(Opportunistic(training_share=1.0).decide([training], sessions, CostModel(), 1.0)) == [1]

    def test_training_does_not_pause_without_decoding_nor_longer_than_the_longest_wait(self):
        training = call(1, session=1, rows=500, training=True, key=MLP, arrived=1.0)
        last = session(1.0, Q_BACK, is_training=True, last_run=0.99, busy_s=10.0)
        gone = {1: last, 2: session(0.5, Q)}
        assert numbers(Opportunistic().decide([training], gone, CostModel(), 1.0)) == [1]
        reads = {1: last, 2: session(1.0, Q, rows=1000)}
        assert numbers(Opportunistic().decide([training], reads, CostModel(), 1.0)) == [1]
        decodes = {1: last, 2: session(1.1, Q)}
        assert numbers(Opportunistic(max_wait_s=0.1).decide([training], decodes, CostModel(), 1.11)) == [1]

    def test_inference_and_training_rows_share_a_batch(self):
        calls = [call(1, rows=500, training=True), call(2, rows=500)]
        assert sorted(numbers(Opportunistic().decide(calls, sessions(1, 2), known_costs(), 0.0))) == [1, 2]

    def test_forward_and_backward_do_not_mix(self):
        calls = [call(1, rows=500), call(2, rows=500, key=Q_BACK)]
        assert len(Opportunistic().decide(calls, sessions(1, 2), known_costs(), 0.0).batch) == 1

    def test_a_large_call_waits_a_bounded_share_of_its_own_time(self):
        policy, costs = Opportunistic(wait_share=0.1), known_costs(fixed=1.0, per_row=1e-3)
        decision = policy.decide([call(1, rows=500)], sessions(1, 2), costs, 0.0)
        assert not decision.batch
        assert decision.next_decision_at == pytest.approx(min(policy.max_wait_s, 0.1 * 1.5))
        assert numbers(policy.decide([call(1, rows=500)], sessions(1, 2), costs, decision.next_decision_at)) == [1]

    def test_a_call_does_not_wait_for_calls_that_would_not_fit(self):
        assert numbers(Opportunistic().decide([call(1, rows=600)], sessions(1, 2), known_costs(fixed=1.0), 0.0)) == [1]

    def test_a_large_call_does_not_wait_if_no_other_session_is_active(self):
        costs = known_costs(fixed=1.0)
        assert numbers(Opportunistic().decide([call(1, rows=500)], sessions(1), costs, 0.0)) == [1]
        stalled = {1: session(10.0), 2: session(1.0)}
        assert numbers(Opportunistic().decide([call(1, rows=500, arrived=10.0)], stalled, costs, 10.0)) == [1]
        all_queued = [call(1, rows=500), call(2, rows=500, key=MLP)]
        assert Opportunistic().decide(all_queued, sessions(1, 2), costs, 0.0).batch

    def test_a_large_call_does_not_wait_if_sharing_saves_nothing(self):
        assert numbers(Opportunistic().decide([call(1, rows=500)], sessions(1, 2), known_costs(fixed=0.0), 0.0)) == [1]

    def test_no_call_waits_without_a_cost_estimate(self):
        assert numbers(Opportunistic().decide([call(1, rows=500)], sessions(1, 2), CostModel(), 0.0)) == [1]

    def test_max_wait_bounds_every_wait(self):
        policy = Opportunistic(max_wait_s=0.001)
        decision = policy.decide([call(1, rows=500)], sessions(1, 2), known_costs(fixed=10.0), 0.0)
        assert decision.next_decision_at == pytest.approx(0.001)

    def test_rows_of_a_batch_are_capped(self):
        calls = [call(i, rows=400) for i in range(1, 6)]
        assert numbers(Opportunistic(max_rows=1000).decide(calls, sessions(1, 2, 3, 4, 5), known_costs(), 0.0)) == [1, 2]

    def test_the_group_furthest_behind_runs_first(self):
        calls = [call(1, key=MLP), call(2, key=Q)]
        assert numbers(Opportunistic().decide(calls, sessions(1, 2), known_costs(), 0.0)) == [2]

    def test_a_group_with_a_session_just_behind_runs_after_others(self):
        calls = [call(1, key=MLP), call(2, key=FAR)]
        behind = {**sessions(1, 2), 3: session(0.0, Q)}
        assert numbers(Opportunistic().decide(calls, behind, known_costs(), 0.0)) == [2]
        assert numbers(Opportunistic().decide(calls[:1], behind, known_costs(), 0.0)) == [1]
        for rest in (
            {**sessions(1, 2), 3: session(0.0, Q_BACK)},
            {**sessions(1, 2), 3: session(-9.0, Q)},
            sessions(1, 2),
        ):
            assert numbers(Opportunistic().decide(calls, rest, known_costs(), 0.0)) == [1]

    def test_training_does_not_starve_under_a_stream_of_small_inference(self):
        policy, costs = Opportunistic(max_wait_s=0.05), known_costs()
        waiting = [call(1, rows=2000, training=True, key=Q_BACK)]
        now, served = 0.0, 0
        for number in range(2, 1000):
            decision = policy.decide([*waiting, call(number, arrived=now)], sessions(1, number, at=now), costs, now)
            if waiting[0] in decision.batch:
                break
            served += 1
            now += 0.001
        assert now <= policy.max_wait_s + 0.002
        assert served

    @pytest.mark.parametrize("training", [False, True])
    def test_a_call_that_fits_no_batch_does_not_starve_among_small_calls_of_its_key(self, training):
        policy, costs = Opportunistic(max_wait_s=0.05), known_costs()
        large = call(1, rows=2000, training=training)
        for step in range(100):
            now = 0.001 * step
            small = [call(number, arrived=now, training=training) for number in (2 * step + 2, 2 * step + 3)]
            if large in policy.decide([large, *small], sessions(1, 2, 3, at=now), costs, now).batch:
                break
        assert now <= policy.max_wait_s + 0.002


queues = st.lists(
    st.builds(
        lambda *call: call,
        st.integers(1, 9), st.integers(0, 3), st.booleans(), st.integers(1, 5000), st.booleans(), st.floats(0, 5),
    ),
    min_size=1, max_size=12, unique_by=lambda row: row[0],
)  # fmt: skip


@given(queues)
@pytest.mark.parametrize("policy", [NoBatching(), Lockstep(), Opportunistic()], ids=lambda p: p.name)
def test_every_queue_is_served_to_the_end_in_valid_batches(policy, rows):
    calls = []
    for number, (caller, layer, back, count, training, arrived) in enumerate(rows):
        key = BatchKey((layer,), Direction.BACKWARD if back else Direction.FORWARD, (layer,))
        calls.append(PendingCall(number, caller, key, count, training, arrived))
    now, rounds = 5.0, 0
    while calls:
        rounds += 1
        assert rounds < 100, "the queue is not being served"
        decision = policy.decide(calls, {c.session: session(now) for c in calls} | {99: session(now)}, known_costs(), now)
        if not decision.batch:
            assert decision.next_decision_at is not None
            assert decision.next_decision_at > now
            now = decision.next_decision_at
            continue
        assert len({c.key for c in decision.batch}) == 1
        assert len(set(decision.batch)) == len(decision.batch)
        assert len(decision.batch) == 1 or sum(c.rows for c in decision.batch) <= getattr(policy, "max_rows", 1)
        calls = [c for c in calls if c not in decision.batch]


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Opportunistic().max_rows = 1


def test_costs_fit_a_line_and_are_zero_at_first():
    costs = CostModel()
    assert costs.estimate("x", 100) == costs.estimate_saving("x") == 0.0
    for rows in (10, 100, 1000) * 10:
        costs.observe("x", rows, 0.002 + 1e-5 * rows)
    assert costs.estimate("x", 500) == pytest.approx(0.007, rel=1e-3)
    assert costs.estimate_saving("x") == pytest.approx(0.002, rel=1e-3)


class TestAsyncCalls:
    """Asynchronous calls of sessions at the same layer of their forward passes share batches."""

    policy = Opportunistic(pass_wait_share=0.1, call_wait_share=0.3)

    def at(self, now, *, key=Q, last_run=0.0, waited=0.0, started=0.0):
        return session(now, key, last_run=last_run, pass_waited_s=waited, pass_started=started, last_pass_s=0.1)

    def test_the_first_call_of_a_pass_waits_for_sessions_about_to_begin_theirs(self):
        mine, soon, later = self.at(1.0, key=FAR, started=0.9), self.at(1.0, started=0.902), self.at(1.0, started=0.95)
        waiting = async_call(1, arrived=1.0)
        decision = self.policy.decide([waiting], {1: mine, 2: soon}, CostModel(), 1.0)
        assert decision.next_decision_at == pytest.approx(1.005)
        assert numbers(self.policy.decide([waiting], {1: mine, 2: later}, CostModel(), 1.0)) == [1]
        assert numbers(self.policy.decide([waiting], {1: mine, 2: soon}, CostModel(), 1.006)) == [1]
        assert numbers(self.policy.decide([waiting, async_call(2, arrived=1.002)], {1: mine, 2: soon}, CostModel(), 1.002)) == [
            1,
            2,
        ]

    def test_later_calls_of_a_pass_wait_for_sessions_at_the_same_layer(self):
        mine, other = self.at(1.0, last_run=0.9990), self.at(1.0, last_run=0.9991)
        waiting = async_call(1, key=MLP, arrived=1.0)
        decision = self.policy.decide([waiting], {1: mine, 2: other}, CostModel(), 1.0)
        assert decision.next_decision_at == pytest.approx(1.0003)
        for elsewhere in (self.at(1.0, last_run=0.99), self.at(1.0, key=FAR, last_run=0.9990)):
            assert numbers(self.policy.decide([waiting], {1: mine, 2: elsewhere}, CostModel(), 1.0)) == [1]

    def test_waits_are_bounded_by_a_share_of_the_pass(self):
        other, waiting = self.at(1.0, last_run=0.999), async_call(1, key=MLP, arrived=1.0)
        nearly, spent = self.at(1.0, last_run=0.999, waited=0.0099), self.at(1.0, last_run=0.999, waited=0.01)
        assert self.policy.decide([waiting], {1: nearly, 2: other}, CostModel(), 1.0).next_decision_at == pytest.approx(1.0001)
        assert numbers(self.policy.decide([waiting], {1: spent, 2: other}, CostModel(), 1.0)) == [1]

    def test_no_call_waits_on_an_idle_gpu(self):
        mine, other = self.at(1.0, last_run=0.9990), self.at(1.0, last_run=0.9991)
        waiting = async_call(1, key=MLP, arrived=1.0)
        assert not self.policy.decide([waiting], {1: mine, 2: other}, CostModel(), 1.0).batch
        mine.last_pass_cost_s = other.last_pass_cost_s = 0.0
        mine.mean_pass_s = 0.101
        assert numbers(self.policy.decide([waiting], {1: mine, 2: other}, CostModel(), 1.0)) == [1]

    def test_sessions_of_more_different_speed_wait_for_each_other_at_higher_load(self):
        mine, other = self.at(1.0, last_run=0.9990), self.at(1.0, last_run=0.9991)
        waiting = async_call(1, key=MLP, arrived=1.0)

        def waits(cost_s: float, pass_s: float) -> bool:
            mine.last_pass_cost_s = other.last_pass_cost_s = cost_s
            other.mean_pass_s = pass_s
            return not self.policy.decide([waiting], {1: mine, 2: other}, CostModel(), 1.0).batch

        assert [waits(0.05, pass_s) for pass_s in (0.051, 0.149, 0.151)] == [True, True, False]
        assert [waits(0.025, pass_s) for pass_s in (0.110, 0.113, 0.080)] == [True, False, False]

    def test_synchronous_calls_do_not_wait(self):
        mine, other = self.at(1.0, last_run=0.999), self.at(1.0, last_run=0.999)
        assert numbers(Opportunistic().decide([call(1, key=MLP, arrived=1.0)], {1: mine, 2: other}, CostModel(), 1.0)) == [1]

    def test_no_call_waits_after_a_pause(self):
        mine, other = session(60.0, FAR, pass_started=0.1, last_pass_s=59.9), self.at(60.0, started=59.95)
        assert numbers(self.policy.decide([async_call(1, arrived=60.0)], {1: mine, 2: other}, CostModel(), 60.0)) == [1]

    def test_decode_calls_share_a_batch_while_training_pauses(self):
        mine, other = self.at(1.0, last_run=0.9990), self.at(1.0, last_run=0.9991)
        trains = session(1.0, Q_BACK, is_training=True, last_run=0.999, busy_s=1.0)
        open_sessions = {1: mine, 2: other, 3: trains}
        waiting, paused = async_call(1, key=MLP, arrived=1.0), call(3, key=Q_BACK, rows=1024, training=True, arrived=1.0)
        assert self.policy.decide([waiting, paused], open_sessions, CostModel(), 1.0).next_decision_at == pytest.approx(1.0003)
        both = [waiting, paused, async_call(2, key=MLP, arrived=1.0001)]
        assert numbers(self.policy.decide(both, open_sessions, CostModel(), 1.0001)) == [1, 2]
        late = call(3, key=Q_BACK, rows=1024, training=True, arrived=0.5)
        assert numbers(self.policy.decide([waiting, late], open_sessions, CostModel(), 1.0)) == [3]
