"""Which engine takes a request with an adapter: one that has it, and two engines have an adapter that is hot."""

from __future__ import annotations

import itertools

from symbiosis.cluster.policies.cluster_state import ClusterRequest
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig
from symbiosis.cluster.step_cost import StepCost

COST = StepCost(fixed_s=0.01, row_s=1e-6, context_s=0, prefill_s=1e-6, attention_s=0, kv_tokens=100_000, max_running=8, slots=2)


class Placing:
    def __init__(self, engines: int) -> None:
        self.policy = ClusterPolicy(PolicyConfig(scale=False), COST)
        for _ in range(engines):
            self.policy.engine_ready(self.policy.add_engine(0.0).number, 0.0)
        self._numbers = itertools.count()

    def submit(self, adapter: str, now: float = 0.0) -> ClusterRequest:
        request = ClusterRequest(next(self._numbers), "t", adapter, 10, now)
        self.policy.submit(request, now)
        return request

    def finish(self, request: ClusterRequest, now: float = 0.0) -> None:
        self.policy.finish(request, now, 10)


def test_requests_of_an_adapter_go_to_its_engine_while_it_is_not_hot():
    placing = Placing(4)
    first = placing.submit("a")
    others = [placing.submit("b"), placing.submit("c")]
    assert {each.engine for each in others}.isdisjoint({first.engine})
    assert {placing.submit("a").engine for _ in range(3)} == {first.engine}


def test_a_hot_adapter_is_on_a_second_engine_before_the_first_is_full():
    placing = Placing(4)
    engines = [placing.submit("a").engine for _ in range(6)]
    assert len(set(engines[:4])) == 1
    assert len(set(engines)) == 2, "and not on a third one while these two take requests"


def fill(placing: Placing, number: int) -> list[ClusterRequest]:
    """Requests without an adapter, until an engine is full."""
    engine, added = placing.policy.state.engines[number], []
    while len(engine.requests) < COST.max_running:
        added.append(ClusterRequest(1000 + len(engine.requests), "t", "", 10, 0.0))
        placing.policy.state.place(added[-1], engine, prefill_s=0.0, reserved=1)
    return added


def test_a_request_waits_for_a_full_engine_that_has_its_adapter_and_others_pass_it():
    placing = Placing(2)
    first = placing.submit("a")
    other = placing.submit("b")
    assert first.engine != other.engine
    fill(placing, first.engine)
    waiting, passing = placing.submit("a", 1.0), placing.submit("b", 1.0)
    assert (waiting.engine, passing.engine) == (-1, -1)
    assert placing.policy.dispatch(1.1) == [passing]
    assert passing.engine == other.engine
    assert placing.policy.dispatch(1.9) == []
    assert placing.policy.dispatch(2.1) == [waiting], "it has waited long enough for another engine to load its adapter"
    assert waiting.engine == other.engine
    placing.policy.state.check_integrity()


def test_a_waiting_request_goes_to_its_engine_as_soon_as_that_has_room():
    placing = Placing(2)
    first = placing.submit("a")
    full = fill(placing, first.engine)
    waiting = placing.submit("a", 1.0)
    placing.policy.state.remove(full[0])
    assert placing.policy.dispatch(1.1) == [waiting]
    assert waiting.engine == first.engine


def test_a_cancelled_request_does_not_wait_any_more():
    placing = Placing(1)
    first = placing.submit("a")
    full = fill(placing, first.engine)
    waiting, next_one = placing.submit("a", 1.0), placing.submit("a", 1.0)
    placing.finish(waiting, 1.1)
    placing.policy.state.remove(full[0])
    assert placing.policy.dispatch(1.2) == [next_one]
    assert placing.policy.dispatch(1.2) == []


def test_a_request_does_not_wait_while_no_engine_has_its_adapter():
    placing = Placing(2)
    for number in range(2 * COST.slots):
        placing.finish(placing.submit(f"a{number}"))
    assert placing.submit("new").engine >= 0
