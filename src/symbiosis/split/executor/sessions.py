"""Sessions and their pending calls: the session from which a policy decides, and the executor's only memory of a tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from symbiosis.split.executor.statistics import TenantTotals
from symbiosis.transport.base import Peer
from symbiosis.types import WITH_BIAS, Direction

_MAX_CLIENT_WORK_S = 0.01  # after a longer gap the tenant was not computing on this host
_SMOOTHING = 0.25  # weight of the last forward pass


@dataclass(frozen=True, slots=True)
class BatchKey:
    """Calls with equal keys can share a batch: same layers, same direction, same shapes."""

    layers: tuple[int, ...]
    direction: Direction
    shape: tuple[int | str, ...] = ()
    """Kinds and widths: the key of the cost model."""
    progress: tuple[int, int] = field(init=False, compare=False)
    """Position in a tenant's forward and backward pass; smaller is earlier."""
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:  # created once, hashed and compared for every call
        first = min(reference & ~WITH_BIAS for reference in self.layers)
        progress = (1, -first) if self.direction.is_backward else (0, first)
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "_hash", hash((self.layers, self.direction, self.shape)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A validated call in the queue, as a policy sees it."""

    number: int  # in order of arrival
    session: int
    key: BatchKey
    rows: int
    training: bool
    arrived: float
    is_async: bool = False  # the executor only launches its batch on the GPU, and does not wait for the result


@dataclass(slots=True, eq=False)
class Session:
    """One channel of a tenant, and what its last calls say about the next ones. Times are the executor's clock."""

    number: int
    tenant: str
    peer: Peer
    last_seen: float  # last message in either direction
    is_busy: bool = False  # a call is queued or running,
    request: int = 0  # with this request number
    totals: TenantTotals = field(default_factory=TenantTotals)  # of the tenant, over all its sessions
    # the last call
    key: BatchKey | None = None
    rows: int = 0
    is_training: bool = False
    last_run: float = 0.0  # start of its batch
    replied: float = 0.0
    busy_s: float = 0.0  # time on the host: the tenant's own work before the call, and the batch
    # the current forward pass
    pass_started: float = 0.0
    pass_waited_s: float = 0.0  # time that its calls spent in the queue
    pass_calls: int = 0
    pass_cost_s: float = 0.0  # estimated time of its calls, each in a batch of its own
    # the forward pass before it; 0 if there was none
    last_pass_s: float = 0.0  # from its start to the start of the next
    last_pass_calls: int = 0
    last_pass_cost_s: float = 0.0
    mean_pass_s: float = 0.0  # of recent forward passes, without time in the queue

    def record(self, call: PendingCall, *, is_entry: bool, started: float, ended: float, batch_s: float, cost_s: float) -> None:
        """A call has run in a batch from `started` to `ended` that occupied the device for `batch_s`.

        `is_entry`: it begins a forward pass. `cost_s`: its estimated time in a batch of its own.
        """
        totals, waited_s = self.totals, started - call.arrived
        totals.last_run = max(totals.last_run, started)
        totals.calls += 1
        totals.rows += call.rows
        totals.waited_s += waited_s
        if call.training:
            totals.training_rows += call.rows
        if is_entry:
            totals.tokens += call.rows
            self._begin_pass(call.arrived)
        self.pass_calls += 1
        self.pass_cost_s += cost_s
        self.pass_waited_s += waited_s
        client_s = call.arrived - self.replied
        is_client_work = 0.0 <= client_s <= _MAX_CLIENT_WORK_S and self.peer.port.same_host
        self.busy_s = batch_s + client_s if is_client_work else batch_s
        self.key, self.rows, self.is_training = call.key, call.rows, call.training or call.key.direction.is_backward
        self.last_run, self.last_seen, self.replied = started, ended, ended

    def _begin_pass(self, arrived: float) -> None:
        self.last_pass_s = arrived - self.pass_started if self.pass_started else 0.0
        pass_s, mean_s = max(0.0, self.last_pass_s - self.pass_waited_s), self.mean_pass_s
        # bounded: a pause between two passes is no slow pass
        self.mean_pass_s = mean_s + _SMOOTHING * (min(pass_s, 2.0 * mean_s) - mean_s) if mean_s else pass_s
        self.last_pass_calls, self.last_pass_cost_s = self.pass_calls, self.pass_cost_s
        self.pass_started, self.pass_waited_s, self.pass_calls, self.pass_cost_s = arrived, 0.0, 0, 0.0


@dataclass(slots=True)
class SessionTable:
    """All open sessions, and totals of tenants that outlive them."""

    max_sessions: int
    open: dict[int, Session] = field(default_factory=dict)
    totals: dict[str, TenantTotals] = field(default_factory=dict)
    _last_number: int = 0

    def add(self, peer: Peer, tenant: str, now: float) -> Session:
        self._last_number += 1
        if tenant not in self.totals and len(self.totals) >= 4 * self.max_sessions:
            # Bounded: without auth tokens, tenants choose their names.
            connected = {session.tenant for session in self.open.values()}
            closed = next((name for name in self.totals if name not in connected), None)
            if closed is not None:
                del self.totals[closed]
        # A new tenant counts as served just now, or each new name would have priority.
        totals = self.totals.setdefault(tenant, TenantTotals(last_run=now))
        session = Session(self._last_number, tenant, peer, now, totals=totals)
        self.open[session.number] = session
        peer.session = session
        return session

    def remove(self, session: Session) -> None:
        if session.peer.session is session:
            session.peer.session = None
            session.peer.port.forget(session.peer)
        self.open.pop(session.number, None)  # last: a session that is not counted holds no memory

    def find_evictable(self, tenant: str, *, own: bool = False) -> Session | None:
        """The session to close for one more of `tenant`: the longest silent one of the tenant with the most sessions.

        With `own`, or if `tenant` has the most, one of its own. A client that is evicted reconnects with HELLO.
        """
        counts = Counter(session.tenant for session in self.open.values())
        own = own or counts[tenant] == max(counts.values(), default=0)
        idle = (each for each in self.open.values() if not each.is_busy and (not own or each.tenant == tenant))
        return min(idle, key=lambda s: (-counts[s.tenant], s.last_seen), default=None)

    def find_idle(self, since: float) -> list[Session]:
        return [s for s in self.open.values() if not s.is_busy and s.last_seen < since]

    def to_json(self, now: float) -> dict[str, dict[str, Any]]:
        """Totals by tenant, with the number of open sessions and the seconds since the last message."""
        tenants = {name: {**totals.to_json(), "sessions": 0, "last_seen_s": None} for name, totals in list(self.totals.items())}
        for session in list(self.open.values()):
            tenant = tenants.get(session.tenant)
            if tenant is not None:  # None: opened after the totals were read
                silent_s = round(now - session.last_seen, 3)
                tenant["sessions"] += 1
                tenant["last_seen_s"] = min(silent_s, tenant["last_seen_s"]) if tenant["sessions"] > 1 else silent_s
        return tenants
