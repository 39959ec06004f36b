"""The states of a job, by OpenAI's names, and what leads from one to another."""

from __future__ import annotations

from enum import StrEnum

from symbiosis.jobs.errors import WrongState


class JobState(StrEnum):
    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class StateChange(StrEnum):
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


_NEXT: dict[StateChange, tuple[JobState, frozenset[JobState]]] = {
    StateChange.VALIDATE: (JobState.QUEUED, frozenset({JobState.VALIDATING})),
    StateChange.BEGIN: (JobState.RUNNING, frozenset({JobState.QUEUED})),
    StateChange.INTERRUPT: (JobState.QUEUED, frozenset({JobState.RUNNING})),
    StateChange.PAUSE: (JobState.PAUSED, frozenset({JobState.QUEUED, JobState.RUNNING})),
    StateChange.RESUME: (JobState.QUEUED, frozenset({JobState.PAUSED})),
    StateChange.CANCEL: (
        JobState.CANCELLED,
        frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.RUNNING, JobState.PAUSED}),
    ),
    # the last step may be done before the engine hears of a pause, and its owner may have resumed it by then
    StateChange.SUCCEED: (JobState.SUCCEEDED, frozenset({JobState.RUNNING, JobState.PAUSED, JobState.QUEUED})),
    StateChange.FAIL: (JobState.FAILED, frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.RUNNING, JobState.PAUSED})),
}


def after(state: JobState, change: StateChange) -> JobState:
    """The state that a change leads to. Raises `WrongState`."""
    following, allowed = _NEXT[change]
    if state not in allowed:
        raise WrongState(
            f"the job is {state}, so it cannot be {change}: only one that is {' or '.join(sorted(allowed))} can",
        )
    return following
