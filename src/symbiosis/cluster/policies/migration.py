"""Migration: cancel a request on one engine and add it again on another, with the tokens delivered so far.

The target prefills prompt and delivered tokens, so a migration costs a prefill. It pays where an engine runs out of KV cache
(memory pressure), where it leaves (scale-in), and where it is lost (failure). To consolidate engines it does not pay by itself:
see docs/adr/028-cluster-policies.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from symbiosis.cluster.policies.cluster_state import ClusterRequest, ClusterState, EngineState, EngineStatus, members


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationConfig:
    """When requests leave a draining engine."""

    drain_s: float = 15.0
    """A draining engine finishes requests for this long, then migrates the others."""
    most_at_once: int = 8
    """Most requests that leave one engine in one second: their prefills load the others."""


def choose_drains(state: ClusterState, count: int) -> list[EngineState]:
    """The engines that are cheapest to empty: the least loaded, ties to the lowest number."""
    found: list[EngineState] = []
    for engines in state.by_level:
        if len(found) >= count:
            break
        found += [state.engines[number] for number in members(engines)]
    return found[:count]


def leaving(engine: EngineState, now: float, config: MigrationConfig) -> list[ClusterRequest]:
    """Requests that a draining engine hands over now: the cheapest to prefill first, those in prefill last."""
    if engine.status is not EngineStatus.DRAINING or now < engine.since + config.drain_s:
        return []
    order = sorted(engine.requests.values(), key=lambda request: (request.prefill_s > 0, request.tokens, request.id))
    return order[: config.most_at_once]


def lost(engine: EngineState) -> list[ClusterRequest]:
    """The requests of an engine that is gone, the oldest first."""
    return sorted(engine.requests.values(), key=lambda request: (request.arrival, request.id))


@dataclass(frozen=True, slots=True)
class Consolidation:
    """What emptying an engine early costs and saves, in engine-seconds."""

    prefill_s: float
    saved_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s > self.prefill_s


def estimate_consolidation(requests: Iterable[ClusterRequest], *, prefill_s: float, remaining_s: float) -> Consolidation:
    """Migrate all requests of an engine now, against letting them finish in `remaining_s`. `prefill_s` is per token."""
    cost = sum(request.tokens for request in requests) * prefill_s
    return Consolidation(cost, max(0.0, remaining_s - cost))
