"""When do queued calls run, and together with whom? Pure objects: they see the queue and a time, nothing else.

A policy is asked again and again: "given these pending calls, these open
sessions and this time, what now?" It answers with a batch to run at once, or
with the time at which to ask again. It has no clock, no threads, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from symbiosis.common.cost_model import CostModel
from symbiosis.types import WITH_BIAS, Direction


@dataclass(frozen=True, slots=True)
class BatchKey:
    """Calls with equal keys can run as one: same layers, same direction, same shapes."""

    layers: tuple[int, ...]
    direction: Direction
    shape: tuple[int | str, ...] = ()
    """Kinds and widths: what costs are learned by."""
    progress: tuple[int, int] = field(init=False, compare=False)
    """How far a pass through the model has come when it asks for this; smaller is earlier."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:  # made once, looked at all the time
        first = min(reference & ~WITH_BIAS for reference in self.layers)
        progress = (1, -first) if self.direction.is_back else (0, first)
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "_hash", hash((self.layers, self.direction, self.shape)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A checked call in the queue, as a policy sees it."""

    number: int
    """Order of arrival."""
    session: int
    key: BatchKey
    rows: int
    training: bool
    arrived: float
    launched: bool = False
    """Its batch is only launched when it leaves the queue: nobody here waits for the result."""


class SessionView(Protocol):
    """What is known of an open session."""

    last_seen: float
    """When it last sent or was sent something."""
    key: BatchKey | None
    """What it called last."""
    rows: int
    """With how many rows."""
    answered: float
    """When that was answered."""
    training: bool
    """Whether that was for training."""
    ran: float
    """When that ran."""
    span_s: float
    """How long that kept the machine busy: the tenant's own work before it, and the call itself."""
    entered: float
    """When its last pass through the model began, and"""
    pass_s: float
    """how long after the one before; 0.0 if there was none."""
    waited_s: float
    """How long its calls of that pass have waited."""
    pass_calls: int
    """How many calls the pass before had, and"""
    pass_cost_s: float
    """what they take, each alone; 0.0 if there was none."""
    own_s: float
    """Its pace: how long its passes take, lately, without waiting here."""

    @property
    def tenant_ran(self) -> float:
        """When a call of its tenant's last ran."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Either a batch (run now) or a time to ask again (None: when something new arrives)."""

    batch: tuple[PendingCall, ...] = ()
    ask_again_at: float | None = None


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def decide(
        self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], costs: CostModel, now: float
    ) -> Decision:
        """`heard` tells what is known of each open session."""


def _fill(calls: Iterable[PendingCall], max_rows: int) -> tuple[PendingCall, ...]:
    """As many calls as fit, at least one, in the order given."""
    batch: list[PendingCall] = []
    rows = 0
    for call in calls:
        if batch and rows + call.rows > max_rows:
            continue
        batch.append(call)
        rows += call.rows
    return tuple(batch)


def _turn(call: PendingCall, heard: Mapping[int, SessionView]) -> tuple[float, int]:
    """Smaller goes first: however many channels a tenant has, others come between two of its calls."""
    last = heard.get(call.session)
    return (last.tenant_ran if last is not None else 0.0, call.number)


def _by_key(pending: Sequence[PendingCall]) -> dict[BatchKey, list[PendingCall]]:
    groups: dict[BatchKey, list[PendingCall]] = {}
    for call in pending:
        groups.setdefault(call.key, []).append(call)
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class NoBatching:
    """Every call by itself, first come first served: the plain reference for the other two."""

    name: str = "none"
    max_wait_s: float = 0.0
    """Nobody ever waits here; the setting exists so that all policies take it."""

    def decide(
        self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], costs: CostModel, now: float
    ) -> Decision:
        return Decision(batch=(min(pending, key=lambda call: call.number),)) if pending else Decision()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lockstep:
    """Waits until every active session has a call, then lets the ones furthest behind catch up.

    So sessions that do the same work walk through the layers together in the
    largest batches, at the pace of the slowest.
    """

    name: str = "lockstep"
    max_wait_s: float = 1.0
    """Longest time a call waits for the others."""
    max_rows: int = 1024
    """Most rows of calls that share a batch: a product of so many keeps a GPU busy by itself, and company costs it copies."""

    def decide(
        self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], costs: CostModel, now: float
    ) -> Decision:
        if not pending:
            return Decision()
        oldest = min(pending, key=lambda call: call.number)
        overdue = oldest.arrived + self.max_wait_s
        active = {session for session, last in heard.items() if now - last.last_seen <= self.max_wait_s}
        if not active <= {call.session for call in pending} and now < overdue:
            return Decision(ask_again_at=overdue)
        groups = _by_key(pending)
        key = oldest.key if now >= overdue else min(groups, key=lambda key: key.progress)
        return Decision(batch=_fill(sorted(groups[key], key=lambda call: call.number), self.max_rows))


_PAUSE = 5.0  # times `company_s` between two passes: that was no pass but a pause
_Rank = tuple[bool, bool, bool, bool, tuple[int, int], float, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opportunistic:
    """Runs what is there; calls may wait a little for company where that pays.

    Small calls (few rows, or hardly more than the fixed cost) go first. Few
    rows never wait: while the executor is busy they meet in the queue anyway,
    and while it is not, waiting would save nothing. Other calls wait at most a
    share of their own time, at most what a merged batch would save. Nobody
    waits longer than `max_wait_s`, and nobody at all if every active session is
    queued already. While somebody decodes, training rests between two calls.

    Where batches are only launched (tenants on the executor's GPU), queues form out of
    sight, and small calls do not meet by themselves. There, who begins a pass waits
    a moment for others about to begin theirs, and in the middle of a pass for those
    who are at the same place: they travel together, at hardly more than the price
    of one. Only those of about the same pace wait for each other, so the
    fast are not held by the slow; how different they may be depends on how full the GPU is with
    calls, since what they save is of use only if somebody wants it. So on an idle GPU nobody waits.
    """

    name: str = "opportunistic"
    max_wait_s: float = 0.1
    """Longest time any call is held back or passed over; then tenants take turns, each first come, first served."""
    max_rows: int = 1024
    """Most rows of calls that share a batch: a product of so many keeps a GPU busy by itself, and company costs it copies."""
    small_rows: int = 64
    """Calls up to this size are small whatever they cost, and never wait."""
    company_s: float = 0.1
    """A session not heard for so long is not expected to come."""
    reach: int = 12
    """A session at most so many layers behind (about one transformer block) will be here soon."""
    wait_share: float = 0.1
    """Longest wait as a share of the call's own measured time."""
    least_gain: float = 0.01
    """Merging that saves less than this share of the time is not waited for."""
    decode_rows: int = 256
    """Inference with more rows at once is no decoding: training does not rest for it."""
    training_share: float = 0.25
    """Share of the time that training gets while somebody decodes; 1.0: as much as it takes."""
    meeting_share: float = 0.5
    """Longest time that a small call's session waits for others in one pass, as a share of the time between two passes."""
    kinship: float = 0.5
    """How different the paces of two may be who wait for each other, as a share, where calls alone would fill the GPU."""
    patience: float = 1.0
    """Longest wait for others in the middle of a pass, at one place, by the time from one call to the next."""

    def decide(
        self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], costs: CostModel, now: float
    ) -> Decision:
        if not pending:
            return Decision()
        meeting = [call for call in pending if call.launched and not call.training and call.rows <= self.decode_rows]
        if not meeting:
            return self._gathered(pending, heard, costs, now)
        others = [call for call in pending if call not in meeting]
        if any(now - call.arrived > self.max_wait_s for call in others):
            return self._gathered(others, heard, costs, now)
        first = self._meet(meeting, heard, now)
        if first.batch or not others:
            return first
        then = self._gathered(others, heard, costs, now)
        times = [each.ask_again_at for each in (first, then) if each.ask_again_at is not None]
        return then if then.batch else Decision(ask_again_at=min(times, default=None))

    def _gathered(
        self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], costs: CostModel, now: float
    ) -> Decision:
        """What is there, or what is worth waiting for."""
        if len(pending) == 1 and pending[0].rows <= self.small_rows and not pending[0].training:
            return Decision(batch=(pending[0],))  # alone, and small calls never wait: as below, sooner
        here = {call.session for call in pending}
        coming = [last.key for session, last in heard.items() if session not in here and now - last.last_seen <= self.company_s]
        rest_until = self._rest_until(heard, now)
        groups = _by_key(pending)
        small = {call.number for call in pending if self._is_small(call, costs)}
        ready: list[tuple[_Rank, BatchKey]] = []
        ask_again: float | None = None
        for key, calls in groups.items():
            wait_until = self._wait_until(key, calls, costs) if coming else now
            if rest_until > now and all(call.training for call in calls):
                wait_until = max(wait_until, min(rest_until, min(call.arrived for call in calls) + self.max_wait_s))
            if now >= wait_until:
                ready.append((self._rank(key, calls, small, coming, heard, now), key))
            else:
                ask_again = wait_until if ask_again is None else min(ask_again, wait_until)
        if not ready:
            return Decision(ask_again_at=ask_again)
        key = min(ready, key=lambda ranked: ranked[0])[1]
        return Decision(batch=self._gather(groups[key], small, heard, now))

    def _is_small(self, call: PendingCall, costs: CostModel) -> bool:
        return call.rows <= self.small_rows or costs.is_mostly_fixed(call.key.shape, call.rows)

    def _rest_until(self, heard: Mapping[int, SessionView], now: float) -> float:
        """When training may go on; in the past if at once."""
        active = [last for last in heard.values() if now - last.answered <= self.company_s and last.key is not None]
        # not every call without a gradient decodes: a trainer's first layer has none either
        if self.training_share >= 1.0 or all(last.training or last.rows > self.decode_rows for last in active):
            return now
        return max((last.ran + last.span_s / self.training_share for last in active if last.training), default=now)

    def _wait_until(self, key: BatchKey, calls: list[PendingCall], costs: CostModel) -> float:
        """When the group must run at the latest; in the past if at once."""
        first = min(call.arrived for call in calls)
        rows = sum(call.rows for call in calls)
        if rows + min(call.rows for call in calls) > self.max_rows or any(call.rows <= self.small_rows for call in calls):
            return first  # one more of its kind would not fit
        gain, own_time = costs.estimate_saving(key.shape), costs.estimate(key.shape, rows)
        if gain < self.least_gain * own_time:
            return first
        return first + min(self.max_wait_s, gain, self.wait_share * own_time)

    def _meet(self, pending: Sequence[PendingCall], heard: Mapping[int, SessionView], now: float) -> Decision:
        """Decoding on a GPU, where every microsecond counts: first come, first served, but for who waits for company."""
        here, load = {call.session for call in pending}, self._load(heard, now)
        ask_again: float | None = None
        for calls in _by_key(pending).values():
            until = self._meet_until(calls, here, heard, load, now)
            if now >= until:
                return Decision(batch=_fill(calls, self.max_rows))
            ask_again = until if ask_again is None else min(ask_again, until)
        return Decision(ask_again_at=ask_again)

    def _meet_until(
        self, calls: list[PendingCall], here: set[int], heard: Mapping[int, SessionView], load: float, now: float
    ) -> float:
        """Until when calls wait for those they can travel with; in the past if for nobody. Who is `here` has called."""
        first = calls[0]
        mine = heard.get(first.session)
        if mine is None or mine.key is None or mine.pass_s > _PAUSE * self.company_s:
            return first.arrived
        near = self.kinship * load**2 * mine.own_s
        key, ran, begins = mine.key, mine.ran, mine.key.progress >= first.key.progress
        patience = 0.5 * self.meeting_share * mine.pass_s if begins else self.patience * mine.pass_s / max(1, mine.pass_calls)
        for session, other in heard.items():
            if session in here or other.training or now - other.last_seen > self.company_s:
                continue
            if abs(other.own_s - mine.own_s) > near:
                continue  # one would hold the other
            if begins and abs(other.entered + other.pass_s - first.arrived) <= patience:
                break  # it is about to begin too
            if not begins and other.key is key and abs(other.ran - ran) <= patience:
                break  # it is at the same place
        else:
            return first.arrived
        until = first.arrived + min(self.max_wait_s, patience)
        for call in calls:
            last = heard.get(call.session)
            if last is not None:
                until = min(until, call.arrived + self.meeting_share * last.pass_s - last.waited_s)
        return until

    def _load(self, heard: Mapping[int, SessionView], now: float) -> float:
        """What the calls of those who decode take, each alone, as a share of the time; 1.0 at most."""
        active = [last for last in heard.values() if not last.training and now - last.last_seen <= self.company_s]
        return min(1.0, sum(last.pass_cost_s / last.pass_s for last in active if last.pass_s > 0.0))

    def _rank(
        self,
        key: BatchKey,
        calls: list[PendingCall],
        small: set[int],
        coming: list[BatchKey | None],
        heard: Mapping[int, SessionView],
        now: float,
    ) -> _Rank:
        """Smaller goes first: overdue, inference, small, nobody just behind, furthest behind, first come.

        So those behind catch up with others of their kind that wait further on,
        and from there they travel together: that is how batches form without
        anybody being held back while there is nothing else to do.
        """
        overdue = [_turn(call, heard) for call in calls if now - call.arrived > self.max_wait_s]
        if overdue:
            return (False, False, False, False, (0, 0), *min(overdue))
        training = all(call.training for call in calls)
        big = all(call.number not in small for call in calls)
        awaited = any(self._is_just_behind(last, key) for last in coming)
        return (True, training, big, awaited, key.progress, 0.0, min(call.number for call in calls))

    def _is_just_behind(self, last: BatchKey | None, key: BatchKey) -> bool:
        """Whether a session that called `last` will soon ask for `key`."""
        if last is None or last.direction is not key.direction:
            return False
        return 0 < key.progress[1] - last.progress[1] <= self.reach

    def _gather(
        self, calls: list[PendingCall], small: set[int], heard: Mapping[int, SessionView], now: float
    ) -> tuple[PendingCall, ...]:
        """Who travels together: inference before training, first come first; small calls take no big ones along."""
        if any(now - call.arrived > self.max_wait_s for call in calls):
            in_turn = sorted(calls, key=lambda call: (now - call.arrived <= self.max_wait_s, *_turn(call, heard)))
            return _fill(in_turn, self.max_rows)
        calls = sorted(calls, key=lambda call: (call.number not in small, call.training, call.number))
        limit = self.max_rows
        if calls[0].number in small:
            limit = max(2 * self.small_rows, sum(c.rows for c in calls if c.number in small))
        return _fill(calls, min(limit, self.max_rows))


POLICIES: dict[str, type[Opportunistic] | type[Lockstep] | type[NoBatching]] = {
    "opportunistic": Opportunistic,
    "lockstep": Lockstep,
    "none": NoBatching,
}
