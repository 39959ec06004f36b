"""Meeting in the middle: how much is computed while the rest is copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from symbiosis.serving.scheduling.block_fetch import meet_in_the_middle


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
