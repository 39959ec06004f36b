"""The open sessions of a trainer, and admission of sessions and calls by the limits they share."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from symbiosis.adapters.files import quote
from symbiosis.errors import OutOfRange, TooManyRequests
from symbiosis.finetuning.calls import SessionCall
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.session import TrainingSession

_MAX_TENANT_CHARACTERS = 256


class SessionRegistry:
    """The trainer holds the lock."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._open: dict[str, TrainingSession] = {}
        self._closed: list[TrainingSession] = []  # a pass may still use their tensors

    def sessions(self) -> list[TrainingSession]:
        return list(self._open.values())

    def ready(self) -> list[TrainingSession]:
        return [session for session in self._open.values() if session.is_ready]

    def has_work(self) -> bool:
        return bool(self._closed) or any(session.is_ready for session in self._open.values())

    def admit_session(self, tenant: str, parameters: int = 0) -> None:
        """Raises `TooManyRequests` if one more session with about so many parameters exceeds a limit."""
        everything, own = self.sessions(), self._of(tenant)
        if len(everything) >= self._config.max_sessions or len(own) >= self._config.tenant_sessions:
            raise TooManyRequests(f"{len(everything)} sessions are open, {len(own)} of this tenant: close one first")
        limits = ((everything, self._config.max_parameters), (own, self._config.tenant_parameters))
        free = min(limit - sum(session.parameter_count for session in sessions) for sessions, limit in limits)
        if parameters > free:
            raise TooManyRequests(f"{parameters} parameters requested, {free} allowed now: close a session first")

    def add(self, session: TrainingSession) -> None:
        self._open[session.id] = session

    def close(self, session: TrainingSession) -> None:
        """Remove a session; `release_closed` drops its tensors."""
        if self._open.pop(session.id, None) is not None:
            self._closed.append(session)

    def release_closed(self) -> None:
        """Drop the tensors of closed sessions. No pass is running."""
        closed, self._closed = self._closed, []
        for session in closed:
            session.release()

    def submit(self, session: TrainingSession, call: SessionCall, number: int | None) -> Future[Any]:
        """Queue a call. Raises what `CallQueue.submit` raises."""
        own, free = self._of(session.tenant), 0
        if call.completions:
            limits = ((self.sessions(), self._config.max_completions), (own, self._config.tenant_completions))
            free = min(limit - sum(each.queue.completions for each in sessions) for sessions, limit in limits)
        tokens = sum(each.queue.tokens for each in own)
        return session.queue.submit(call, number, tenant_tokens=tokens, free_completions=free)

    def _of(self, tenant: str) -> list[TrainingSession]:
        return [session for session in self._open.values() if session.tenant == tenant]


def check_open(tenant: str, seed: int, weight: float) -> None:
    """Raises `OutOfRange` if one of the arguments of `open` is invalid."""
    if not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_TENANT_CHARACTERS:
        expected = f"a name of 1 to {_MAX_TENANT_CHARACTERS} characters"
        raise OutOfRange(f"tenant is {quote(tenant)}", field="tenant", expected=expected)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
        raise OutOfRange(f"weight is {quote(weight)}", field="weight", expected="an int or float from 0.001 to 1000")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise OutOfRange(f"seed is {quote(seed)}", field="seed", expected="an int from 0 to 2**63 - 1")
