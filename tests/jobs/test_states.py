"""A job's life: what leads where, and nothing else does."""

from __future__ import annotations

import pytest

from symbiosis.jobs.errors import WrongState
from symbiosis.jobs.states import Change, State, after

V, Q, R, P, S, F, C = State

LIFE = {
    Change.VALIDATE: {V: Q},
    Change.BEGIN: {Q: R},
    Change.INTERRUPT: {R: Q},
    Change.PAUSE: {Q: P, R: P},
    Change.RESUME: {P: Q},
    Change.CANCEL: {V: C, Q: C, R: C, P: C},
    Change.SUCCEED: {R: S, P: S, Q: S},
    Change.FAIL: {V: F, Q: F, R: F, P: F},
}


@pytest.mark.parametrize("change", Change)
@pytest.mark.parametrize("state", State)
def test_every_change_of_every_state(state, change):
    if state in LIFE[change]:
        assert after(state, change) is LIFE[change][state]
    else:
        with pytest.raises(WrongState, match=f"is {state}, so it cannot be {change}"):
            after(state, change)


def test_from_an_end_nothing_leads_on():
    assert [state for state in State if state.is_end] == [S, F, C]
    assert not [state for found in LIFE.values() for state in found if state.is_end]
