"""A job's life: what leads where, and nothing else does."""

from __future__ import annotations

import pytest

from symbiosis.jobs.errors import WrongState
from symbiosis.jobs.states import JobState, StateChange, after

V, Q, R, P, S, F, C = JobState

LIFE = {
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
def test_every_change_of_every_state(state, change):
    if state in LIFE[change]:
        assert after(state, change) is LIFE[change][state]
    else:
        with pytest.raises(WrongState, match=f"is {state}, so it cannot be {change}"):
            after(state, change)


def test_from_an_end_nothing_leads_on():
    assert [state for state in JobState if state.is_end] == [S, F, C]
    assert not [state for found in LIFE.values() for state in found if state.is_end]
