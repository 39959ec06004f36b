"""Waiting sequences by tenant and adapter, with fairness by virtual token counters (as in S-LoRA and VTC).

A tenant's counter grows with the tokens computed for it, divided by its weight. A tenant that becomes active is lifted to
the virtual time, the least counter of the waiting tenants, so that idle time earns no credit. Each tenant has one lane per
adapter: an adapter that is still loading delays only its own lane.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from symbiosis.serving.scheduling.sequence import Sequence, SequenceState


@dataclass(slots=True, eq=False)
class Lane:
    """Waiting sequences of one tenant with one adapter, first in, first out."""

    adapter: str
    last_served: float
    """Time of the last admission; at first, of the first arrival."""
    sequences: OrderedDict[str, Sequence] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class Tenant:
    name: str
    counter: float = 0.0
    """Virtual token counter."""
    num_running: int = 0
    num_waiting: int = 0
    num_unfinished: int = 0
    lanes: OrderedDict[str, Lane] = field(default_factory=OrderedDict)
    """Least recently served first; none is empty."""


class FairQueue:
    """The waiting sequences of all tenants, except preempted ones."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        """Tenants with unfinished sequences, or with a counter above the virtual time."""
        self.children: dict[str, dict[str, Sequence]] = {}
        """By parent: sequences that wait until the parent has prefilled the prompt."""
        self.num_waiting = 0
        self.virtual_time = 0.0
        self._active: dict[str, Tenant] = {}  # those with lanes

    def add(self, sequence: Sequence, *, parent: Sequence | None) -> None:
        """Queue a sequence; with a `parent`, after the parent's prefill."""
        tenant = self.tenants.setdefault(sequence.tenant, Tenant(sequence.tenant))
        tenant.num_unfinished += 1
        tenant.num_waiting += 1
        self.num_waiting += 1
        if parent is not None:
            self.children.setdefault(parent.id, {})[sequence.id] = sequence
        else:
            self._push(tenant, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        tenant = self.tenants[sequence.tenant]
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        parent = sequence.parent
        if parent is not None and sequence.id in self.children.get(parent.id, ()):
            del self.children[parent.id][sequence.id]
            if not self.children[parent.id]:
                del self.children[parent.id]
            return
        lane = tenant.lanes[sequence.adapter]
        del lane.sequences[sequence.id]
        if not lane.sequences:
            del tenant.lanes[lane.adapter]
        if not tenant.lanes:
            del self._active[tenant.name]

    def admit(self, sequence: Sequence, charge: float, now: float) -> None:
        """Remove a sequence that starts to run, and charge its tenant."""
        tenant = self.tenants[sequence.tenant]
        tenant.counter += charge
        tenant.lanes[sequence.adapter].last_served = now
        tenant.lanes.move_to_end(sequence.adapter)
        self.remove(sequence)

    def release_children(self, parent_id: str) -> None:
        """Move children to the head of their lanes: the prompt is computed, or the parent has finished."""
        for child in reversed(self.children.pop(parent_id, {}).values()):
            self._push(self.tenants[child.tenant], child, first=True)

    def finish(self, sequence: Sequence) -> None:
        """Account for the end of a sequence that neither waits nor runs."""
        self.release_children(sequence.id)
        tenant = self.tenants[sequence.tenant]
        tenant.num_unfinished -= 1
        if not tenant.num_unfinished and tenant.counter <= self.virtual_time:
            del self.tenants[tenant.name]  # its next sequence is lifted to the virtual time anyway

    def find_candidates(self, max_running: int) -> list[Tenant]:
        """Tenants with lanes that run fewer than `max_running` sequences. Advances the virtual time."""
        # A tenant at its limit competes with no other: its counter says nothing about their shares.
        tenants = [tenant for tenant in self._active.values() if tenant.num_running < max_running]
        if tenants:
            self.virtual_time = max(self.virtual_time, min(tenant.counter for tenant in tenants))
        return tenants

    def check_integrity(self, running: Seq[Sequence], preempted: Seq[Sequence]) -> list[Sequence]:
        """Assert that all counts add up; the waiting sequences."""
        lanes = [(tenant, lane) for tenant in self.tenants.values() for lane in tenant.lanes.values()]
        waiting = [sequence for _, lane in lanes for sequence in lane.sequences.values()]
        waiting += [child for children in self.children.values() for child in children.values()]
        assert len(waiting) == self.num_waiting
        assert all(lane.sequences and tenant.name in self._active for tenant, lane in lanes)
        assert all(tenant.lanes for tenant in self._active.values())
        assert all(sequence.state is SequenceState.WAITING and not sequence.block_table for sequence in waiting)
        for tenant in self.tenants.values():
            count_running, count_waiting, count_preempted = (
                sum(sequence.tenant == tenant.name for sequence in group) for group in (running, waiting, preempted)
            )
            assert tenant.num_running == count_running
            assert tenant.num_waiting == count_waiting
            assert tenant.num_unfinished == count_running + count_waiting + count_preempted
        return waiting

    def _push(self, tenant: Tenant, sequence: Sequence, *, first: bool = False) -> None:
        if not tenant.lanes:
            tenant.counter = max(tenant.counter, self.virtual_time)
            self._active[tenant.name] = tenant
        lane = tenant.lanes.get(sequence.adapter)
        if lane is None:
            lane = tenant.lanes[sequence.adapter] = Lane(sequence.adapter, sequence.arrival)
        lane.sequences[sequence.id] = sequence
        if first:
            lane.sequences.move_to_end(sequence.id, last=False)
