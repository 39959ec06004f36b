"""KV coordination: the owner first, the formula, and meeting in the middle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.cluster.policies.kv_coordination import (
    Dispatch,
    KvDirectory,
    choose_dispatch,
    copy_order,
    load_s,
    meet_in_the_middle,
)


@given(st.integers(1, 200_000), st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))
def test_meeting_in_the_middle_beats_both_ways_alone(tokens, compute_s, copy_s):
    move = meet_in_the_middle(tokens, compute_s=compute_s, copy_s=copy_s)
    assert move.computed + move.copied == tokens
    slack = max(compute_s, copy_s)  # a token is not divided
    assert move.seconds <= tokens * compute_s + slack
    assert move.seconds <= tokens * copy_s + slack
    assert move.seconds <= tokens / (1 / compute_s + 1 / copy_s) + slack


def test_a_slow_start_of_the_copy_leaves_more_to_compute():
    fast = meet_in_the_middle(1000, compute_s=1e-3, copy_s=1e-3)
    slow = meet_in_the_middle(1000, compute_s=1e-3, copy_s=1e-3, start_s=0.2)
    assert (fast.computed, slow.computed) == (500, 600)
    assert meet_in_the_middle(1000, compute_s=1e-3, copy_s=1e-3, start_s=5.0).copied == 0
    assert meet_in_the_middle(0, compute_s=1, copy_s=1).seconds == 0.0


def option(engine: int, **changes: object) -> Dispatch:
    terms = {"queue_s": 0.1, "compute_s": 0.2, "transfer_s": 0.0, "swap_s": 0.0, "idle": False}
    return Dispatch(engine, **{**terms, **changes})


def test_the_owner_comes_first_if_it_has_room():
    owner = option(0, queue_s=5.0, owns=True)
    assert choose_dispatch([option(1), owner]) is owner
    assert choose_dispatch([option(1), option(0, owns=True, fits=False)]).engine == 1
    assert choose_dispatch([option(1, fits=False)]) is None


def test_the_least_delay_counts_otherwise():
    assert choose_dispatch([option(1, queue_s=1.0), option(2, transfer_s=0.5), option(3, swap_s=2.0)]).engine == 2
    assert choose_dispatch([option(2), option(1)]).engine == 1


def test_an_idle_device_loads_during_the_transfer():
    assert load_s(1.0, 0.4, idle=True) == pytest.approx(0.6)
    assert load_s(0.3, 0.4, idle=True) == 0.0
    assert load_s(1.0, 0.4, idle=False) == 1.0


def test_blocks_with_few_references_move_first():
    assert copy_order([(1, 3, 0.0), (2, 1, 5.0), (3, 1, 2.0)]) == [3, 2, 1]


def test_the_directory_finds_the_longest_prefix():
    directory = KvDirectory()
    directory.add(0, [1, 2, 3])
    directory.add(1, [1, 2])
    assert directory.find_owners((1, 2, 3, 4), 0b11) == (0b01, 3)
    assert directory.find_owners((1, 2, 9), 0b11) == (0b11, 2)
    assert directory.find_owners((1, 2, 3), 0b10) == (0b10, 2)
    directory.evict(0, [2])
    assert directory.find_owners((1, 2, 3), 0b11) == (0b10, 2)
    directory.drop_engine(1)
    assert directory.find_owners((1,), 0b11) == (0b01, 1)
    assert directory.find_owners((7,), 0b11) == (0, 0)


def test_the_directory_is_bounded():
    directory = KvDirectory(max_blocks=10)
    directory.add(0, range(100))
    assert directory.find_owners((0,), 1) == (0, 0)
    assert directory.find_owners((99,), 1) == (1, 1)
