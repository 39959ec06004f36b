"""Batching policies: which queued calls run next, and in which batch.

A policy is a pure object without clock, threads or tensors. `decide` sees the pending calls, the open sessions, the cost
model and the time. It returns a batch to run now, or the time of the next decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from symbiosis.common.cost_model import CostModel
from symbiosis.split.executor.sessions import BatchKey, PendingCall, Session

_MAX_PASS_GAP = 5.0  # times `active_s`: a longer gap between two forward passes is a pause
Pending: TypeAlias = Sequence[PendingCall]
Sessions: TypeAlias = Mapping[int, Session]
"""Open sessions by number."""
_Rank = tuple[bool, bool, bool, bool, tuple[int, int], float, int]


@dataclass(frozen=True, slots=True)
class Decision:
    """A batch to run now, or the time of the next decision (None: when a message arrives)."""

    batch: tuple[PendingCall, ...] = ()
    next_decision_at: float | None = None


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def decide(self, pending: Pending, sessions: Sessions, costs: CostModel, now: float) -> Decision: ...


def _fill(calls: Iterable[PendingCall], max_rows: int) -> tuple[PendingCall, ...]:
    """As many calls as fit, at least one, in the given order."""
    batch: list[PendingCall] = []
    rows = 0
    for call in calls:
        if batch and rows + call.rows > max_rows:
            continue
        batch.append(call)
        rows += call.rows
    return tuple(batch)


def _fair_rank(call: PendingCall, sessions: Sessions) -> tuple[float, int]:
    """Smaller runs first: the tenant whose last batch is the oldest, whatever its number of sessions."""
    session = sessions.get(call.session)
    return (session.totals.last_run if session is not None else 0.0, call.number)


def _group_by_key(pending: Pending) -> dict[BatchKey, list[PendingCall]]:
    groups: dict[BatchKey, list[PendingCall]] = {}
    for call in pending:
        groups.setdefault(call.key, []).append(call)
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class NoBatching:
    """Each call in a batch of its own, first come first served: the plain reference for the other policies."""

    name: str = "none"
    max_wait_s: float = 0.0
    """Without effect; all policies have this setting."""

    def decide(self, pending: Pending, sessions: Sessions, costs: CostModel, now: float) -> Decision:
        return Decision(batch=(min(pending, key=lambda call: call.number),)) if pending else Decision()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lockstep:
    """Waits until every active session has a call, then runs the group that is the furthest behind.

    Sessions with equal work pass through the layers together, in the largest batches and at the speed of the slowest.
    """

    name: str = "lockstep"
    max_wait_s: float = 1.0
    """Longest time that a call waits for the others."""
    max_rows: int = 1024
    """Most rows of calls that share a batch: so many rows fill a GPU, and sharing costs copies."""

    def decide(self, pending: Pending, sessions: Sessions, costs: CostModel, now: float) -> Decision:
        if not pending:
            return Decision()
        oldest = min(pending, key=lambda call: call.number)
        deadline = oldest.arrived + self.max_wait_s
        active = {number for number, session in sessions.items() if now - session.last_seen <= self.max_wait_s}
        if not active <= {call.session for call in pending} and now < deadline:
            return Decision(next_decision_at=deadline)
        groups = _group_by_key(pending)
        key = oldest.key if now >= deadline else min(groups, key=lambda key: key.progress)
        return Decision(batch=_fill(sorted(groups[key], key=lambda call: call.number), self.max_rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Opportunistic:
    """Runs what is queued; calls wait a little for others where a shared batch is cheaper.

    Small calls (few rows, or hardly more than the fixed cost) run first and never wait: while the executor is busy they
    meet in the queue, and while it is idle a wait saves nothing. Other calls wait at most a share of their own time, and at
    most what a shared batch saves. No call waits longer than `max_wait_s`, nor if every active session has a call. While a
    session decodes, training pauses between two calls.

    Asynchronous calls (tenants on the executor's GPU) queue on the GPU instead, and do not meet by themselves. The first
    call of a forward pass waits for sessions about to begin theirs; later calls wait for sessions at the same layer. Only
    sessions of similar speed wait for each other. How similar depends on the load of the GPU: on an idle one no call waits.
    """

    name: str = "opportunistic"
    max_wait_s: float = 0.1
    """Longest time that a call is held back or passed over; overdue calls run in fair order over tenants."""
    max_rows: int = 1024
    """Most rows of calls that share a batch: so many rows fill a GPU, and sharing costs copies."""
    small_rows: int = 64
    """Calls up to this size are small whatever their cost, and never wait."""
    active_s: float = 0.1
    """A session that was silent for longer is not waited for."""
    reach_layers: int = 12
    """A session at most this many layers behind (about one transformer block) is expected soon."""
    wait_share: float = 0.1
    """Longest wait, as a share of the call's estimated time."""
    min_gain: float = 0.01
    """Least estimate_saving worth a wait, as a share of the call's estimated time."""
    decode_rows: int = 256
    """An inference call with more rows is no decoding: training does not pause for it."""
    training_share: float = 0.25
    """Share of the time that training has while a session decodes; 1.0 turns the pauses off."""
    pass_wait_share: float = 0.5
    """Longest time that a session waits for others in one forward pass, as a share of the time between two passes."""
    max_speed_difference: float = 0.5
    """Largest difference of pass times of sessions that wait for each other, as a share, on a fully loaded GPU."""
    call_wait_share: float = 1.0
    """Longest wait in the middle of a forward pass, as a multiple of the time between two calls."""

    def decide(self, pending: Pending, sessions: Sessions, costs: CostModel, now: float) -> Decision:
        if not pending:
            return Decision()
        decoding = [call for call in pending if call.is_async and not call.training and call.rows <= self.decode_rows]
        if not decoding:
            return self._decide_by_cost(pending, sessions, costs, now)
        others = [call for call in pending if call not in decoding]
        if any(now - call.arrived > self.max_wait_s for call in others):
            return self._decide_by_cost(others, sessions, costs, now)
        first = self._decide_async(decoding, sessions, now)
        if first.batch or not others:
            return first
        then = self._decide_by_cost(others, sessions, costs, now)
        times = [each.next_decision_at for each in (first, then) if each.next_decision_at is not None]
        return then if then.batch else Decision(next_decision_at=min(times, default=None))

    def _decide_by_cost(self, pending: Pending, sessions: Sessions, costs: CostModel, now: float) -> Decision:
        if len(pending) == 1 and pending[0].rows <= self.small_rows and not pending[0].training:
            return Decision(batch=(pending[0],))  # a shortcut: one small call never waits
        queued = {call.session for call in pending}
        active = [s for number, s in sessions.items() if number not in queued and now - s.last_seen <= self.active_s]
        pause_until = self._training_pause(sessions, now)
        groups = _group_by_key(pending)
        small = {c.number for c in pending if c.rows <= self.small_rows or costs.is_mostly_fixed(c.key.shape, c.rows)}
        ready: list[tuple[_Rank, BatchKey]] = []
        next_decision: float | None = None
        for key, calls in groups.items():
            wait_until = self._cost_deadline(key, calls, costs) if active else now
            if pause_until > now and all(call.training for call in calls):
                wait_until = max(wait_until, min(pause_until, min(call.arrived for call in calls) + self.max_wait_s))
            if now >= wait_until:
                ready.append((self._rank(key, calls, small, active, sessions, now), key))
            else:
                next_decision = wait_until if next_decision is None else min(next_decision, wait_until)
        if not ready:
            return Decision(next_decision_at=next_decision)
        key = min(ready, key=lambda ranked: ranked[0])[1]
        return Decision(batch=self._select(groups[key], small, sessions, now))

    def _training_pause(self, sessions: Sessions, now: float) -> float:
        """When training may continue; not later than `now` if at once."""
        active = [s for s in sessions.values() if now - s.replied <= self.active_s and s.key is not None]
        # The first layer of a training step has no gradient either: a call without one is not always decoding.
        if self.training_share >= 1.0 or all(s.is_training or s.rows > self.decode_rows for s in active):
            return now
        return max((s.last_run + s.busy_s / self.training_share for s in active if s.is_training), default=now)

    def _cost_deadline(self, key: BatchKey, calls: list[PendingCall], costs: CostModel) -> float:
        """When the group must run at the latest; in the past if at once."""
        arrived = min(call.arrived for call in calls)
        rows = sum(call.rows for call in calls)
        if rows + min(call.rows for call in calls) > self.max_rows or any(call.rows <= self.small_rows for call in calls):
            return arrived  # small, or one more call would not fit
        saved_s, own_s = costs.estimate_saving(key.shape), costs.estimate(key.shape, rows)
        if saved_s < self.min_gain * own_s:
            return arrived
        return arrived + min(self.max_wait_s, saved_s, self.wait_share * own_s)

    def _decide_async(self, pending: Pending, sessions: Sessions, now: float) -> Decision:
        """Decoding on a GPU: first come first served, except for groups that wait for other sessions."""
        queued, load = {call.session for call in pending}, self._gpu_load(sessions, now)
        next_decision: float | None = None
        for calls in _group_by_key(pending).values():
            deadline = self._async_deadline(calls, queued, sessions, load, now)
            if now >= deadline:
                return Decision(batch=_fill(calls, self.max_rows))
            next_decision = deadline if next_decision is None else min(next_decision, deadline)
        return Decision(next_decision_at=next_decision)

    def _async_deadline(self, calls: Pending, queued: set[int], sessions: Sessions, load: float, now: float) -> float:
        """Until when a group waits for sessions it can share batches with; in the past if it does not wait.

        `queued` are the sessions that have a call.
        """
        first = calls[0]
        own = sessions.get(first.session)
        if own is None or own.key is None or own.last_pass_s > _MAX_PASS_GAP * self.active_s:
            return first.arrived
        max_difference_s = self.max_speed_difference * load**2 * own.mean_pass_s
        key, last_run, begins_pass = own.key, own.last_run, own.key.progress >= first.key.progress
        if begins_pass:
            max_wait_s = 0.5 * self.pass_wait_share * own.last_pass_s
        else:
            max_wait_s = self.call_wait_share * own.last_pass_s / max(1, own.last_pass_calls)
        for number, other in sessions.items():
            if number in queued or other.is_training or now - other.last_seen > self.active_s:
                continue
            if abs(other.mean_pass_s - own.mean_pass_s) > max_difference_s:
                continue  # the slower session would hold the faster one back
            if begins_pass and abs(other.pass_started + other.last_pass_s - first.arrived) <= max_wait_s:
                break  # it is about to begin a pass too
            if not begins_pass and other.key is key and abs(other.last_run - last_run) <= max_wait_s:
                break  # it is at the same layer
        else:
            return first.arrived
        deadline = first.arrived + min(self.max_wait_s, max_wait_s)
        for call in calls:
            session = sessions.get(call.session)
            if session is not None:
                deadline = min(deadline, call.arrived + self.pass_wait_share * session.last_pass_s - session.pass_waited_s)
        return deadline

    def _gpu_load(self, sessions: Sessions, now: float) -> float:
        """Estimated share of the time that decode calls would take, each in a batch of its own; 1.0 at most."""
        active = [s for s in sessions.values() if not s.is_training and now - s.last_seen <= self.active_s]
        return min(1.0, sum(s.last_pass_cost_s / s.last_pass_s for s in active if s.last_pass_s > 0.0))

    def _rank(
        self, key: BatchKey, calls: Pending, small: set[int], active: list[Session], sessions: Sessions, now: float
    ) -> _Rank:
        """Smaller runs first: overdue, inference, small, no session just behind, furthest behind, first come.

        Sessions behind catch up with others that wait at later layers, and share batches from there on. So batches form
        while no call is held back on an idle executor.
        """
        overdue = [_fair_rank(call, sessions) for call in calls if now - call.arrived > self.max_wait_s]
        if overdue:
            return (False, False, False, False, (0, 0), *min(overdue))
        training = all(call.training for call in calls)
        is_large = all(call.number not in small for call in calls)
        behind = [s.key for s in active if s.key is not None and s.key.direction is key.direction]
        is_awaited = any(0 < key.progress[1] - last.progress[1] <= self.reach_layers for last in behind)
        return (True, training, is_large, is_awaited, key.progress, 0.0, min(call.number for call in calls))

    def _select(self, calls: Pending, small: set[int], sessions: Sessions, now: float) -> tuple[PendingCall, ...]:
        """The calls of a group that share the batch: inference before training, small calls without large ones."""
        if any(now - call.arrived > self.max_wait_s for call in calls):
            fair = sorted(calls, key=lambda call: (now - call.arrived <= self.max_wait_s, *_fair_rank(call, sessions)))
            return _fill(fair, self.max_rows)
        calls = sorted(calls, key=lambda call: (call.number not in small, call.training, call.number))
        max_rows = self.max_rows
        if calls[0].number in small:
            max_rows = min(max_rows, max(2 * self.small_rows, sum(c.rows for c in calls if c.number in small)))
        return _fill(calls, max_rows)


POLICIES: dict[str, type[Opportunistic] | type[Lockstep] | type[NoBatching]] = {
    "opportunistic": Opportunistic,
    "lockstep": Lockstep,
    "none": NoBatching,
}
