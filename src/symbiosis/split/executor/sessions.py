"""Who is connected, and the figures about each: the executor's only memory of a tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from symbiosis.split.executor.policies import BatchKey
from symbiosis.transport.base import Peer


@dataclass(slots=True)
class Counts:
    """A tenant's totals since the start."""

    calls: int = 0
    rows: int = 0
    training_rows: int = 0
    tokens: int = 0
    """Rows that entered the model's first layer forward."""
    errors: int = 0
    waited_s: float = 0.0
    """Time calls spent in the queue."""
    ran: float = 0.0
    """When the last one ran."""

    def as_dict(self) -> dict[str, float]:
        mean_wait = self.waited_s / self.calls if self.calls else 0.0
        return {
            "calls": self.calls,
            "rows": self.rows,
            "training_rows": self.training_rows,
            "tokens": self.tokens,
            "errors": self.errors,
            "mean_wait_ms": round(mean_wait * 1e3, 4),
        }


@dataclass(slots=True, eq=False)
class Session:
    """One channel of a tenant."""

    number: int
    tenant: str
    peer: Peer
    last_seen: float
    busy: bool = False
    """A call of this session is queued or running."""
    request: int = 0
    """The request it is busy with."""
    key: BatchKey | None = None
    """What it called last."""
    rows: int = 0
    """With how many rows."""
    training: bool = False
    """Whether that was for training."""
    ran: float = 0.0
    """When that ran."""
    span_s: float = 0.0
    """How long that kept the machine busy: the tenant's own work before it, and the call itself."""
    answered: float = 0.0
    """When that was answered."""
    entered: float = 0.0
    """When its last pass through the model began, and"""
    pass_s: float = 0.0
    """how long after the one before; 0.0 if there was none."""
    waited_s: float = 0.0
    """How long its calls of that pass have waited."""
    calls: int = 0
    """Its calls of that pass, so far,"""
    spent_s: float = 0.0
    """what they take, each alone, and"""
    pass_calls: int = 0
    """how many the pass before had;"""
    pass_cost_s: float = 0.0
    """what those took."""
    own_s: float = 0.0
    """Its pace: how long its passes take, lately, without waiting in the queue."""
    counts: Counts = field(default_factory=Counts)
    """All of its tenant's."""

    @property
    def tenant_ran(self) -> float:
        return self.counts.ran

    def enter(self, arrived: float) -> None:
        """A pass through the model begins."""
        self.pass_s = arrived - self.entered if self.entered else 0.0
        own = max(0.0, self.pass_s - self.waited_s)
        # a pause is no slow pass
        self.own_s = 0.75 * self.own_s + 0.25 * min(own, 2.0 * self.own_s) if self.own_s else own
        self.pass_calls, self.pass_cost_s = self.calls, self.spent_s
        self.entered, self.waited_s, self.calls, self.spent_s = arrived, 0.0, 0, 0.0


@dataclass(slots=True)
class Sessions:
    """All channels, and per-tenant totals that outlive them."""

    max_sessions: int
    open: dict[int, Session] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    _numbers: int = 0

    def add(self, peer: Peer, tenant: str, now: float) -> Session:
        self._numbers += 1
        session = Session(self._numbers, tenant, peer, now)
        self.open[session.number] = session
        if tenant not in self.counts and len(self.counts) >= 4 * self.max_sessions:
            # names without tokens are free to invent: do not let them fill the memory
            here = {s.tenant for s in self.open.values()}
            gone = next((name for name in self.counts if name not in here), None)
            if gone is not None:
                del self.counts[gone]
        # who has just come was served just now, or new names would always be next
        session.counts = self.counts.setdefault(tenant, Counts(ran=now))
        peer.session = session
        return session

    def remove(self, session: Session) -> None:
        if session.peer.session is session:
            session.peer.session = None
            session.peer.port.forget(session.peer)
        self.open.pop(session.number, None)  # last: where it is not counted any more, its memory has gone too

    def count(self, tenant: str) -> int:
        return sum(session.tenant == tenant for session in self.open.values())

    def expendable(self, tenant: str, *, own: bool = False) -> Session | None:
        """Whom to forget where one more channel of `tenant` wants in: the longest silent of the tenant with the most.

        So one tenant that opens channel after channel pushes out its `own`, and
        whoever is pushed out but alive just says HELLO again.
        """
        channels = Counter(session.tenant for session in self.open.values())
        own = own or channels[tenant] == max(channels.values(), default=0)
        idle = (each for each in self.open.values() if not each.busy and (not own or each.tenant == tenant))
        return min(idle, key=lambda s: (-channels[s.tenant], s.last_seen), default=None)

    def idle(self, since: float) -> list[Session]:
        return [s for s in self.open.values() if not s.busy and s.last_seen < since]
