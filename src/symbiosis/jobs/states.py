"""States of a fine-tuning job, by OpenAI's names, and the changes between them."""

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
    """The values appear in error messages."""

    VALIDATE = "validated"
    BEGIN = "begun"
    INTERRUPT = "interrupted"
    """The server stops, or the engine is at capacity: the job resumes later from its last checkpoint."""
    PAUSE = "paused"
    RESUME = "resumed"
    CANCEL = "cancelled"
    SUCCEED = "finished"
    FAIL = "failed"


_OPEN = frozenset(state for state in JobState if not state.is_end)
_NEXT: dict[StateChange, tuple[JobState, frozenset[JobState]]] = {
    StateChange.VALIDATE: (JobState.QUEUED, frozenset({JobState.VALIDATING})),
    StateChange.BEGIN: (JobState.RUNNING, frozenset({JobState.QUEUED})),
    StateChange.INTERRUPT: (JobState.QUEUED, frozenset({JobState.RUNNING})),
    StateChange.PAUSE: (JobState.PAUSED, frozenset({JobState.QUEUED, JobState.RUNNING})),
    StateChange.RESUME: (JobState.QUEUED, frozenset({JobState.PAUSED})),
    StateChange.CANCEL: (JobState.CANCELLED, _OPEN),
    # The last step may be done before the engine receives a pause, and the job may be resumed by then.
    StateChange.SUCCEED: (JobState.SUCCEEDED, frozenset({JobState.RUNNING, JobState.PAUSED, JobState.QUEUED})),
    StateChange.FAIL: (JobState.FAILED, _OPEN),
}


def next_state(state: JobState, change: StateChange) -> JobState:
    """Raises `WrongState` if the change is not allowed in this state."""
    following, allowed = _NEXT[change]
    if state not in allowed:
        raise WrongState(f"the job is {state}, so it cannot be {change}: expected a job that is {' or '.join(sorted(allowed))}")
    return following
