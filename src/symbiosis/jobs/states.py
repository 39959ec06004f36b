"""The states of a job, by OpenAI's names, and what leads from one to another."""

from __future__ import annotations

from enum import StrEnum

from symbiosis.jobs.errors import WrongState


class State(StrEnum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


class Change(StrEnum):
    """What happens to a job; the words stand in errors."""

    VALIDATE = "validated"
    BEGIN = "begun"
    INTERRUPT = "interrupted"
    """The server stops, or the engine had no room: it goes on later from its last checkpoint."""
    PAUSE = "paused"
    RESUME = "resumed"
    CANCEL = "cancelled"
    SUCCEED = "finished"
    FAIL = "failed"


_NEXT: dict[Change, tuple[State, frozenset[State]]] = {
    Change.VALIDATE: (State.QUEUED, frozenset({State.VALIDATING})),
    Change.BEGIN: (State.RUNNING, frozenset({State.QUEUED})),
    Change.INTERRUPT: (State.QUEUED, frozenset({State.RUNNING})),
    Change.PAUSE: (State.PAUSED, frozenset({State.QUEUED, State.RUNNING})),
    Change.RESUME: (State.QUEUED, frozenset({State.PAUSED})),
    Change.CANCEL: (State.CANCELLED, frozenset({State.VALIDATING, State.QUEUED, State.RUNNING, State.PAUSED})),
    # the last step may be done before the engine hears of a pause, and its owner may have resumed it by then
    Change.SUCCEED: (State.SUCCEEDED, frozenset({State.RUNNING, State.PAUSED, State.QUEUED})),
    Change.FAIL: (State.FAILED, frozenset({State.VALIDATING, State.QUEUED, State.RUNNING, State.PAUSED})),
}


def after(state: State, change: Change) -> State:
    """The state that a change leads to. Raises `WrongState`."""
    following, allowed = _NEXT[change]
    if state not in allowed:
        raise WrongState(
            f"the job is {state}, so it cannot be {change}: only one that is {' or '.join(sorted(allowed))} can",
        )
    return following
