"""State machine of a job: every allowed change, and no other."""

from __future__ import annotations

import pytest

from symbiosis.jobs.errors import WrongState
from symbiosis.jobs.states import JobState, StateChange, next_state

V, Q, R, P, S, F, C = JobState

ALLOWED = {
    StateChange.VALIDATE: {V: Q},
    StateChange.BEGIN: {Q: R},
    StateChange.INTERRUPT: {R: Q},
    StateChange.PAUSE: {Q: P, R: P},
    StateChange.RESUME: {P: Q},
    StateChange.CANCEL: {V: C, Q: C, R: C, P: C},
    StateChange.SUCCEED: {R: S, P: S, Q: S},
    StateChange.FAIL: {V: F, Q: F, R: F, P: F},
}


@pytest.mark.parametrize("change", StateChange)
@pytest.mark.parametrize("state", JobState)
def test_every_change_in_every_state(state, change):
    if state in ALLOWED[change]:
        assert next_state(state, change) is ALLOWED[change][state]
    else:
        with pytest.raises(WrongState, match=f"is {state}, so it cannot be {change}"):
            next_state(state, change)


def test_no_change_leaves_an_end_state():
    assert [state for state in JobState if state.is_end] == [S, F, C]
    assert not [state for found in ALLOWED.values() for state in found if state.is_end]
