"""Statistics of a cluster: those of its engines, added up, and each engine's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from symbiosis.adapters.names import split_qualified_name
from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.members import Member, Members
from symbiosis.director.placement import Placement
from symbiosis.errors import SymbiosisError
from symbiosis.jobs.states import JobState
from symbiosis.server.metrics.counts import TENANT_COUNTERS
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.transport.engine_ipc import Body

_STATS_S = 1.0
_SUMMED = (
    "adapters_resident", "adapters_loading", "adapter_loads", "adapter_load_s", "running", "waiting", "blocks", "blocks_free",
    "blocks_cached", "host_blocks", "host_blocks_used", "host_blocks_stored", "host_blocks_restored", "blocks_fetched",
    "blocks_sent", "preemptions", "steps", "rows", "tokens",
)  # fmt: skip
_CACHE = ("device", "device_bytes", "device_held", "device_evictions", "host", "host_limit", "loading", "loads", "load_s")
_IDLE = {
    "calls": 0,
    "rows": 0,
    "training_rows": 0,
    "tokens": 0,
    "errors": 0,
    "mean_wait_ms": 0.0,
    "sessions": 0,
    "last_seen_s": None,
}
"""Of a tenant: a cluster has no split tenants."""
_SHOWN = (
    "running", "waiting", "blocks", "blocks_free", "blocks_fetched", "blocks_sent", "adapters_resident", "adapter_loads",
    "steps", "tokens",
)  # fmt: skip
Deliver = Callable[[Any], None]


class ClusterStatistics:
    def __init__(self, members: Members, adapters: ClusterAdapters, placement: Placement) -> None:
        self._members, self._adapters, self._placement = members, adapters, placement
        self.counts: HttpCounts | None = None
        self._started = time.monotonic()

    async def poll(self) -> None:
        """Ask all engines once. One that does not reply keeps its last statistics."""

        async def ask(member: Member) -> None:
            with suppress(SymbiosisError, TimeoutError):
                async with asyncio.timeout(_STATS_S):
                    member.stats = await member.client.ask("stats")

        await asyncio.gather(*(ask(member) for member in list(self._members.by_name.values())))

    async def stats(self, id: str, body: Body) -> Body:
        """As an engine's, for the whole cluster."""
        return self._serving()

    def snapshot(self, has_keys: bool) -> dict[str, Any]:
        """As one server's (`app.statistics`), with the engines. Callable on any thread."""
        counts = self.counts
        jobs = [] if counts is None else counts.jobs()
        states = {state.value: 0 for state in JobState}
        for _, state, count in jobs:
            states[state] = states.get(state, 0) + count
        model = self._members.model
        return {
            "model": "" if model is None else model["name"],
            "uptime_s": round(time.monotonic() - self._started, 3),
            "device": "cluster",
            "tenants": self._tenants(jobs),
            "serving": self._serving(),
            "http": None if counts is None else {**counts.http(), "has_keys": has_keys},
            "jobs": states,
            "training": None,
            "memory": {},
            "history": {},
            "cluster": self._placement.stats(),
            "engines": self._engines(),
        }

    def _engines(self) -> dict[str, Any]:
        return {
            member.name: {
                "status": self._placement.status_of(member),
                "address": member.address.messages,
                "node": urlsplit(member.address.messages).hostname or "",
                "jobs": member.jobs,
                "adapters": len(member.loaded),
                "adapter_names": sorted(member.loaded),
                "adapters_on_device": member.stats.get("adapters_on_device", []),
                **{name: member.stats.get(name, 0) for name in _SHOWN},
            }
            for member in list(self._members.by_name.values())
        }

    def _serving(self) -> dict[str, Any]:
        members = list(self._members.by_name.values())
        known = [member.stats for member in members if member.stats]
        sums: dict[str, Any] = {name: sum(stats[name] for stats in known) for name in _SUMMED}
        served = dict(self._adapters.served)
        sums["adapters"] = {name: each.hash for name, each in served.items()}
        sums["adapters_pinned"] = sorted(name for name, each in served.items() if each.pinned)
        sums["adapter_cache"] = {name: sum(stats["adapter_cache"].get(name, 0) for stats in known) for name in _CACHE}
        sums["block_size"] = known[0]["block_size"] if known else 0
        sums["max_model_len"] = min((member.facts.max_model_len for member in members), default=0)
        return sums

    def _tenants(self, jobs: list[tuple[str, str, int]]) -> dict[str, Any]:
        counts = {} if self.counts is None else self.counts.tenants()
        own: dict[str, dict[str, int]] = {}
        for tenant, state, count in jobs:
            own.setdefault(tenant, {})[state] = count
        adapters: dict[str, list[str]] = {}
        for full in list(self._adapters.served):
            owner, name = split_qualified_name(full)
            if owner is not None:
                adapters.setdefault(owner, []).append(name)
        return {
            tenant: {
                **_IDLE,
                **counts.get(tenant, dict.fromkeys(TENANT_COUNTERS, 0)),
                "jobs": own.get(tenant, {}),
                "adapters": sorted(adapters.get(tenant, ())),
            }
            for tenant in dict.fromkeys((*counts, *own, *adapters))
        }
