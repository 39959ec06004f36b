"""The engine that has a prompt's prefix comes first, unless its load is too far ahead, or the request has left it."""

from __future__ import annotations

from symbiosis.cluster.policies.cluster_state import ClusterRequest
from symbiosis.cluster.policies.kv_coordination import PlacedBlocks
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig
from symbiosis.cluster.step_cost import StepCost

COST = StepCost(
    fixed_s=0.01, row_s=1e-6, context_s=0, prefill_s=1e-6, attention_s=0, kv_tokens=100_000, max_running=64, start_s=1
)
BLOCKS = (1, 2, 3, 4)


def make_policy(engines: int, **changes: object) -> ClusterPolicy:
    policy = ClusterPolicy(PolicyConfig(block_tokens=100, scale=False, **changes), COST)
    for _ in range(engines):
        policy.engine_ready(policy.add_engine(0.0).number, 0.0)
    return policy


def request(number: int, blocks: tuple[int, ...] = (), prompt: int = 400) -> ClusterRequest:
    return ClusterRequest(number, "t", "", prompt, 0.0, blocks)


def test_the_owner_takes_the_request():
    policy = make_policy(3)
    policy.cache_blocks(2, BLOCKS, [])
    owned = request(0, BLOCKS)
    assert policy.submit(owned, 0.0) == 2
    assert owned.cached == 399
    assert policy.submit(request(1), 0.0) == 0


def test_an_owner_whose_load_is_too_far_ahead_does_not():
    policy = make_policy(2, owner_imbalance=0.25)
    policy.cache_blocks(1, BLOCKS, [])
    taken = [policy.submit(request(number, BLOCKS), 0.0) for number in range(40)]
    assert taken[:16] == [1] * 16  # a quarter of 64 sequences
    assert 10 < taken.count(0) < 24
    short = make_policy(2, owner_imbalance=0.25)
    short.cache_blocks(1, BLOCKS, [])
    taken = [short.submit(request(number, BLOCKS, prompt=4000), 0.0) for number in range(10)]
    assert taken[:2] == [1, 0]  # a tenth of the prompt is worth a tenth of that: less than one such request


def test_a_request_that_left_an_engine_without_kv_cache_does_not_return_at_once():
    policy = make_policy(2)
    policy.cache_blocks(0, BLOCKS, [])
    moved = request(0, BLOCKS)
    assert policy.submit(moved, 0.0) == 0
    assert policy.report_pressure(moved, 1.0)
    policy.requeue(moved, 1.0, 10)
    assert policy.dispatch(1.0) == [moved]
    assert moved.engine == 1
    assert not moved.avoided
    policy.state.check_integrity()


def test_an_avoided_engine_is_better_than_none():
    policy = make_policy(1)
    only = request(0)
    only.avoided = 1
    assert policy.submit(only, 0.0) == 0


def test_what_was_placed_last_is_remembered():
    placed = PlacedBlocks(max_blocks=5)
    assert placed.add(0, (1, 2, 3)) == []
    assert placed.add(0, (1, 2, 4)) == []
    assert placed.add(1, (1, 2, 3)) == []
    assert placed.add(0, (7, 8)) == [3]  # the end of the prompt that was used longest ago
    assert placed.add(0, (9,)) == [4]
    placed.drop_engine(0)
    assert placed.add(0, (1, 2, 3, 4, 5)) == []
