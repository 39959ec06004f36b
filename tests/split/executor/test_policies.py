"""Policies are pure: they see a queue and a time. Nobody sleeps here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.split.executor.cost_model import CostModel
from symbiosis.split.executor.policies import BatchKey, Lockstep, NoBatching, Opportunistic, PendingCall
from symbiosis.types import Direction

Q = BatchKey((0,), Direction.FORWARD, ("q",))
FAR = BatchKey((500,), Direction.FORWARD, ("far",))
MLP = BatchKey((5,), Direction.FORWARD, ("mlp",))
Q_BACK = BatchKey((0,), Direction.BACKWARD, ("q",))


@dataclass
class Heard:
    last_seen: float
    key: BatchKey | None = None
    training: bool = False
    ran: float = 0.0
    span_s: float = 0.0
    rows: int = 1
    entered: float = 0.0
    pass_s: float = 0.0
    waited_s: float = 0.0
    pass_cost_s: float = 0.1
    pass_calls: int = 100
    own_s: float = 0.1
    tenant_ran: float = 0.0

    @property
    def answered(self) -> float:
        return self.last_seen


def call(number, session=None, key=Q, rows=1, training=False, arrived=0.0):
    return PendingCall(number, session or number, key, rows, training, arrived)


def launched(number, session=None, key=Q, rows=1, arrived=0.0):
    return PendingCall(number, session or number, key, rows, training=False, arrived=arrived, launched=True)


def known_costs(fixed=0.010, per_row=1e-5, shapes=("q", "mlp")):
    costs = CostModel()
    for shape in shapes:
        for rows in (1, 100, 1000):
            costs.observe((shape,), rows, fixed + per_row * rows)
    return costs


def heard(*sessions, at=0.0):
    return dict.fromkeys(sessions, Heard(at))


def numbers(decision):
    return [c.number for c in decision.batch]


def test_an_empty_queue_waits_for_something_new():
    for policy in (NoBatching(), Lockstep(), Opportunistic()):
        decision = policy.decide([], {}, CostModel(), 0.0)
        assert not decision.batch
        assert decision.ask_again_at is None


def test_none_runs_each_call_alone_in_order_of_arrival():
    calls = [call(2), call(1), call(3)]
    assert numbers(NoBatching().decide(calls, heard(1, 2, 3), CostModel(), 0.0)) == [1]


class TestLockstep:
    def test_it_waits_for_every_active_session_but_not_for_ever(self):
        policy = Lockstep(max_wait_s=1.0)
        waiting = policy.decide([call(1)], heard(1, 2), CostModel(), 0.5)
        assert not waiting.batch
        assert waiting.ask_again_at == 1.0
        assert numbers(policy.decide([call(1)], heard(1, 2), CostModel(), 1.0)) == [1]

    def test_a_session_not_heard_for_long_is_not_waited_for(self):
        assert numbers(
            Lockstep(max_wait_s=1.0).decide([call(1, arrived=5.0)], {1: Heard(5.0), 2: Heard(1.0)}, CostModel(), 5.0)
        ) == [1]

    def test_all_calls_of_the_layer_furthest_behind_run_together(self):
        calls = [call(1, key=MLP), call(2), call(3, key=Q_BACK), call(4)]
        assert numbers(Lockstep().decide(calls, heard(1, 2, 3, 4), CostModel(), 0.0)) == [2, 4]


class TestOpportunistic:
    def test_a_small_call_does_not_wait(self):
        assert numbers(Opportunistic().decide([call(1)], heard(1, 2, 3), known_costs(), 0.0)) == [1]

    def test_a_call_that_hardly_costs_more_than_a_small_one_is_small(self):
        cheap = known_costs(fixed=0.010, per_row=1e-6)
        large = call(1, rows=2560, key=MLP)
        ahead = call(3, rows=1, key=FAR)
        assert numbers(Opportunistic().decide([ahead, large], heard(1, 3), cheap, 0.0)) == [1]
        assert numbers(Opportunistic().decide([ahead, large], heard(1, 3), known_costs(), 0.0)) == [3]

    def test_a_small_call_takes_no_big_one_along(self):
        calls = [call(1, rows=4096), call(2, rows=1), call(3, rows=2)]
        assert numbers(Opportunistic().decide(calls, heard(1, 2, 3), known_costs(), 0.0)) == [2, 3]

    def test_inference_goes_before_training(self):
        calls = [call(1, rows=500, training=True, key=MLP), call(2, rows=500)]
        assert numbers(Opportunistic().decide(calls, heard(1, 2), known_costs(), 0.0)) == [2]

    def test_training_rests_while_somebody_decodes(self):
        training = call(1, session=1, rows=500, training=True, key=MLP, arrived=1.0)
        sessions = {1: Heard(1.0, Q_BACK, training=True, ran=0.99, span_s=0.01), 2: Heard(0.999, Q)}
        policy = Opportunistic(training_share=0.25)
        decision = policy.decide([training], sessions, CostModel(), 1.0)
        assert not decision.batch
        assert decision.ask_again_at == pytest.approx(0.99 + 0.01 / 0.25)
        assert numbers(policy.decide([training], sessions, CostModel(), 1.04)) == [1]
        assert numbers(policy.decide([training, call(2, key=Q, arrived=1.0)], sessions, CostModel(), 1.0)) == [2]
        assert numbers(Opportunistic(training_share=1.0).decide([training], sessions, CostModel(), 1.0)) == [1]

    def test_training_does_not_rest_when_nobody_decodes_or_for_longer_than_the_longest_wait(self):
        training = call(1, session=1, rows=500, training=True, key=MLP, arrived=1.0)
        last = Heard(1.0, Q_BACK, training=True, ran=0.99, span_s=10.0)
        gone = {1: last, 2: Heard(0.5, Q)}
        assert numbers(Opportunistic().decide([training], gone, CostModel(), 1.0)) == [1]
        reads = {1: last, 2: Heard(1.0, Q, rows=1000)}
        assert numbers(Opportunistic().decide([training], reads, CostModel(), 1.0)) == [1]
        decodes = {1: last, 2: Heard(1.1, Q)}
        assert numbers(Opportunistic(max_wait_s=0.1).decide([training], decodes, CostModel(), 1.11)) == [1]

    def test_inference_and_training_rows_share_a_batch(self):
        calls = [call(1, rows=500, training=True), call(2, rows=500)]
        assert sorted(numbers(Opportunistic().decide(calls, heard(1, 2), known_costs(), 0.0))) == [1, 2]

    def test_forward_and_backward_do_not_mix(self):
        calls = [call(1, rows=500), call(2, rows=500, key=Q_BACK)]
        assert len(Opportunistic().decide(calls, heard(1, 2), known_costs(), 0.0).batch) == 1

    def test_a_big_call_waits_a_bounded_share_of_its_own_time(self):
        policy, costs = Opportunistic(wait_share=0.1), known_costs(fixed=1.0, per_row=1e-3)
        decision = policy.decide([call(1, rows=500)], heard(1, 2), costs, 0.0)
        assert not decision.batch
        assert decision.ask_again_at == pytest.approx(min(policy.max_wait_s, 0.1 * 1.5))
        assert numbers(policy.decide([call(1, rows=500)], heard(1, 2), costs, decision.ask_again_at)) == [1]

    def test_a_call_does_not_wait_for_company_that_would_not_fit(self):
        assert numbers(Opportunistic().decide([call(1, rows=600)], heard(1, 2), known_costs(fixed=1.0), 0.0)) == [1]

    def test_a_big_call_does_not_wait_when_nobody_else_can_come(self):
        costs = known_costs(fixed=1.0)
        assert numbers(Opportunistic().decide([call(1, rows=500)], heard(1), costs, 0.0)) == [1]
        stalled = {1: Heard(10.0), 2: Heard(1.0)}
        assert numbers(Opportunistic().decide([call(1, rows=500, arrived=10.0)], stalled, costs, 10.0)) == [1]
        everybody = [call(1, rows=500), call(2, rows=500, key=MLP)]
        assert Opportunistic().decide(everybody, heard(1, 2), costs, 0.0).batch

    def test_a_big_call_does_not_wait_when_nothing_would_be_gained(self):
        assert numbers(Opportunistic().decide([call(1, rows=500)], heard(1, 2), known_costs(fixed=0.0), 0.0)) == [1]

    def test_nothing_known_yet_means_no_wait(self):
        assert numbers(Opportunistic().decide([call(1, rows=500)], heard(1, 2), CostModel(), 0.0)) == [1]

    def test_the_provider_sets_the_worst_wait(self):
        policy = Opportunistic(max_wait_s=0.001)
        decision = policy.decide([call(1, rows=500)], heard(1, 2), known_costs(fixed=10.0), 0.0)
        assert decision.ask_again_at == pytest.approx(0.001)

    def test_rows_of_a_batch_are_capped(self):
        calls = [call(i, rows=400) for i in range(1, 6)]
        assert numbers(Opportunistic(max_rows=1000).decide(calls, heard(1, 2, 3, 4, 5), known_costs(), 0.0)) == [1, 2]

    def test_those_behind_catch_up_so_that_batches_form(self):
        calls = [call(1, key=MLP), call(2, key=Q)]
        assert numbers(Opportunistic().decide(calls, heard(1, 2), known_costs(), 0.0)) == [2]

    def test_where_somebody_is_just_behind_others_go_first(self):
        calls = [call(1, key=MLP), call(2, key=FAR)]
        behind = {**heard(1, 2), 3: Heard(0.0, Q)}
        assert numbers(Opportunistic().decide(calls, behind, known_costs(), 0.0)) == [2]
        assert numbers(Opportunistic().decide(calls[:1], behind, known_costs(), 0.0)) == [1]
        for nobody in ({**heard(1, 2), 3: Heard(0.0, Q_BACK)}, {**heard(1, 2), 3: Heard(-9.0, Q)}, heard(1, 2)):
            assert numbers(Opportunistic().decide(calls, nobody, known_costs(), 0.0)) == [1]

    def test_nobody_starves_under_a_stream_of_small_inference(self):
        policy, costs = Opportunistic(max_wait_s=0.05), known_costs()
        waiting = [call(1, rows=2000, training=True, key=Q_BACK)]
        now, served = 0.0, 0
        for number in range(2, 1000):
            decision = policy.decide([*waiting, call(number, arrived=now)], heard(1, number, at=now), costs, now)
            if waiting[0] in decision.batch:
                break
            served += 1
            now += 0.001
        assert now <= policy.max_wait_s + 0.002
        assert served

    @pytest.mark.parametrize("training", [False, True])
    def test_a_call_that_fits_no_batch_does_not_starve_beside_small_ones_of_its_kind(self, training):
        policy, costs = Opportunistic(max_wait_s=0.05), known_costs()
        large = call(1, rows=2000, training=training)
        for step in range(100):
            now = 0.001 * step
            small = [call(number, arrived=now, training=training) for number in (2 * step + 2, 2 * step + 3)]
            if large in policy.decide([large, *small], heard(1, 2, 3, at=now), costs, now).batch:
                break
        assert now <= policy.max_wait_s + 0.002


queues = st.lists(
    st.builds(
        lambda session, layer, back, rows, training, arrived: (session, layer, back, rows, training, arrived),
        st.integers(1, 9), st.integers(0, 3), st.booleans(), st.integers(1, 5000), st.booleans(), st.floats(0, 5),
    ),
    min_size=1, max_size=12, unique_by=lambda row: row[0],
)  # fmt: skip


@given(queues)
@pytest.mark.parametrize("policy", [NoBatching(), Lockstep(), Opportunistic()], ids=lambda p: p.name)
def test_every_queue_is_served_to_the_end_in_valid_batches(policy, rows):
    calls = []
    for number, (session, layer, back, count, training, arrived) in enumerate(rows):
        key = BatchKey((layer,), Direction.BACKWARD if back else Direction.FORWARD, (layer,))
        calls.append(PendingCall(number, session, key, count, training, arrived))
    now, rounds = 5.0, 0
    while calls:
        rounds += 1
        assert rounds < 100, "the queue is not being served"
        decision = policy.decide(calls, {c.session: Heard(now) for c in calls} | {99: Heard(now)}, known_costs(), now)
        if not decision.batch:
            assert decision.ask_again_at is not None
            assert decision.ask_again_at > now
            now = decision.ask_again_at
            continue
        assert len({c.key for c in decision.batch}) == 1
        assert len(set(decision.batch)) == len(decision.batch)
        assert len(decision.batch) == 1 or sum(c.rows for c in decision.batch) <= getattr(policy, "max_rows", 1)
        calls = [c for c in calls if c not in decision.batch]


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Opportunistic().max_rows = 1


def test_costs_fit_a_line_and_know_nothing_at_first():
    costs = CostModel()
    assert costs.estimate("x", 100) == costs.saving("x") == 0.0
    for rows in (10, 100, 1000) * 10:
        costs.observe("x", rows, 0.002 + 1e-5 * rows)
    assert costs.estimate("x", 500) == pytest.approx(0.007, rel=1e-3)
    assert costs.saving("x") == pytest.approx(0.002, rel=1e-3)


class TestTravellingTogether:
    """Where batches are only launched: calls of tenants at the same place of their passes."""

    policy = Opportunistic(meeting_share=0.1, patience=0.3)

    def at(self, now, *, key=Q, ran=0.0, waited=0.0, entered=0.0):
        return Heard(now, key, ran=ran, waited_s=waited, entered=entered, pass_s=0.1)

    def test_who_begins_a_pass_waits_for_others_about_to(self):
        mine, soon, later = self.at(1.0, key=FAR, entered=0.9), self.at(1.0, entered=0.902), self.at(1.0, entered=0.95)
        waiting = launched(1, arrived=1.0)
        decision = self.policy.decide([waiting], {1: mine, 2: soon}, CostModel(), 1.0)
        assert decision.ask_again_at == pytest.approx(1.005)
        assert numbers(self.policy.decide([waiting], {1: mine, 2: later}, CostModel(), 1.0)) == [1]
        assert numbers(self.policy.decide([waiting], {1: mine, 2: soon}, CostModel(), 1.006)) == [1]
        assert numbers(self.policy.decide([waiting, launched(2, arrived=1.002)], {1: mine, 2: soon}, CostModel(), 1.002)) == [
            1,
            2,
        ]

    def test_in_the_middle_of_a_pass_those_at_the_same_place_are_waited_for(self):
        mine, beside = self.at(1.0, ran=0.9990), self.at(1.0, ran=0.9991)
        waiting = launched(1, key=MLP, arrived=1.0)
        decision = self.policy.decide([waiting], {1: mine, 2: beside}, CostModel(), 1.0)
        assert decision.ask_again_at == pytest.approx(1.0003)
        for elsewhere in (self.at(1.0, ran=0.99), self.at(1.0, key=FAR, ran=0.9990)):
            assert numbers(self.policy.decide([waiting], {1: mine, 2: elsewhere}, CostModel(), 1.0)) == [1]

    def test_nobody_waits_more_than_a_share_of_its_pass(self):
        beside, waiting = self.at(1.0, ran=0.999), launched(1, key=MLP, arrived=1.0)
        nearly, spent = self.at(1.0, ran=0.999, waited=0.0099), self.at(1.0, ran=0.999, waited=0.01)
        assert self.policy.decide([waiting], {1: nearly, 2: beside}, CostModel(), 1.0).ask_again_at == pytest.approx(1.0001)
        assert numbers(self.policy.decide([waiting], {1: spent, 2: beside}, CostModel(), 1.0)) == [1]

    def test_nobody_waits_where_there_is_room_for_everybody_alone(self):
        mine, beside = self.at(1.0, ran=0.9990), self.at(1.0, ran=0.9991)
        waiting = launched(1, key=MLP, arrived=1.0)
        assert not self.policy.decide([waiting], {1: mine, 2: beside}, CostModel(), 1.0).batch
        mine.pass_cost_s = beside.pass_cost_s = 0.0
        mine.own_s = 0.101
        assert numbers(self.policy.decide([waiting], {1: mine, 2: beside}, CostModel(), 1.0)) == [1]

    def test_the_fuller_the_gpu_the_more_different_may_be_who_waits_for_another(self):
        mine, beside = self.at(1.0, ran=0.9990), self.at(1.0, ran=0.9991)
        waiting = launched(1, key=MLP, arrived=1.0)

        def waits(cost: float, pace: float) -> bool:
            mine.pass_cost_s = beside.pass_cost_s = cost
            beside.own_s = pace
            return not self.policy.decide([waiting], {1: mine, 2: beside}, CostModel(), 1.0).batch

        assert [waits(0.05, pace) for pace in (0.051, 0.149, 0.151)] == [True, True, False]
        assert [waits(0.025, pace) for pace in (0.110, 0.113, 0.080)] == [True, False, False]

    def test_where_batches_run_at_once_nobody_waits(self):
        mine, beside = self.at(1.0, ran=0.999), self.at(1.0, ran=0.999)
        assert numbers(Opportunistic().decide([call(1, key=MLP, arrived=1.0)], {1: mine, 2: beside}, CostModel(), 1.0)) == [1]

    def test_after_a_pause_nobody_waits(self):
        mine, beside = Heard(60.0, FAR, entered=0.1, pass_s=59.9), self.at(60.0, entered=59.95)
        assert numbers(self.policy.decide([launched(1, arrived=60.0)], {1: mine, 2: beside}, CostModel(), 60.0)) == [1]

    def test_they_meet_colocation_that_rests(self):
        mine, beside = self.at(1.0, ran=0.9990), self.at(1.0, ran=0.9991)
        trains = Heard(1.0, Q_BACK, training=True, ran=0.999, span_s=1.0)
        heard = {1: mine, 2: beside, 3: trains}
        waiting, resting = launched(1, key=MLP, arrived=1.0), call(3, key=Q_BACK, rows=1024, training=True, arrived=1.0)
        assert self.policy.decide([waiting, resting], heard, CostModel(), 1.0).ask_again_at == pytest.approx(1.0003)
        both = [waiting, resting, launched(2, key=MLP, arrived=1.0001)]
        assert numbers(self.policy.decide(both, heard, CostModel(), 1.0001)) == [1, 2]
        late = call(3, key=Q_BACK, rows=1024, training=True, arrived=0.5)
        assert numbers(self.policy.decide([waiting, late], heard, CostModel(), 1.0)) == [3]
