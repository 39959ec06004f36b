"""The director of a cluster: which engines there are, which of them takes a request, which adapters and jobs are where.

No token passes through it. HTTP processes ask it before they send a request to an engine; without it they go on with the
engines that they know. It keeps the registry of adapters in a file; everything else follows from what engines and HTTP
processes send when they connect again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symbiosis.cluster.policies.job_placement import JobConfig
from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.policies.policy import PolicyConfig
from symbiosis.cluster.policies.scaling import ScalingConfig
from symbiosis.cluster.step_cost import read_step_cost
from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.jobs import ClusterJobs
from symbiosis.director.members import Member, Members
from symbiosis.director.operations import Operations
from symbiosis.director.placement import Placement
from symbiosis.director.statistics import ClusterStatistics
from symbiosis.errors import BadMessage, EngineLost, UnknownEngine
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.server.services.rate_limit_service import RateLimitService
from symbiosis.serving.engine_messages import JobEvent, int_field, text_field
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.engine_ipc import Body, ClusterKey, EngineListener

_DISPATCH_S = 0.1
_TICK_S = 1.0
_SETTLE_S = 10.0
"""After its start engines have this long to join again, before their number is changed."""
_FORGET_S = 120.0
"""Launchers hear of a lost engine for so long: none of them may have it any more."""
_MAX_JOINED = 4096
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectorConfig:
    host: str
    port: int = 0
    secret: str = field(repr=False)
    """Of the cluster: engines and HTTP processes have it too."""
    state: Path
    """Folder for what outlives a restart."""
    engines: int = 1
    """At the start, and the fewest."""
    max_engines: int | None = None
    """None: as many as at the start."""
    profile: str | None = None
    """Of the engines (`symbiosis profile`), for the policy; None: their speed is unknown."""
    objective: Objective = Objective()  # noqa: RUF009 - frozen
    """Counts with a profile only."""
    hung_s: float = 60.0
    """An engine that was lost and has not joined again after so long is killed, if its process is still there, and replaced."""
    at_once: int | None = None
    per_minute: int | None = None
    has_keys: bool = False
    store: str | None = None
    """For engines that join from other hosts."""


class Director:
    """Runs on the event loop it is created on."""

    def __init__(self, config: DirectorConfig) -> None:
        """Raises `NotStored` or `BadProfile`."""
        self._config = config
        key, most = ClusterKey.of(config.secret), config.max_engines or config.engines
        cost = None if config.profile is None else read_step_cost(config.profile)
        scaling = ScalingConfig(min_engines=config.engines, max_engines=most)
        policy = PolicyConfig(scale=True, scaling=scaling).aimed_at(config.objective)
        config.state.mkdir(parents=True, exist_ok=True)
        listener = EngineListener(host=config.host, port=config.port, clients=key, keys=ClusterKey.of_director(config.secret))
        self.rpc = RpcServer(listener)
        self.address = listener.address
        self._members = Members(key, None, self._changed)
        registry, has_store = config.state / "adapters.json", config.store is not None
        self._adapters = ClusterAdapters(self._members, registry, self._least_loaded, has_store=has_store)
        self._placement = Placement(policy, cost, self._members, self._adapters, self._move, engines=config.engines)
        self._members.on_joined, self._members.on_lost = self._add_engine, self._drop_engine
        self._jobs = ClusterJobs(self.rpc, self._members, self._adapters, self._placement, JobConfig())
        self._statistics = ClusterStatistics(self._members, self._adapters, self._placement)
        self._operations = Operations(self.rpc)
        self._watches: dict[str, None] = {}
        self._launchers: dict[str, int] = {}
        """With the engines that each keeps running by itself, such as those of another host."""
        self.wanted = config.engines
        """Engines that launchers keep running."""
        self._leaving: set[str] = set()
        self._missing: dict[str, float] = {}
        """When each lost engine was lost."""
        self._lost = 0
        """Engines that ended without having been let go."""
        self._started = time.monotonic()
        self._add_operations()
        RateLimitService(self.rpc, RequestLimits(at_once=config.at_once, per_minute=config.per_minute))
        collect = HttpCounts(self.rpc, lambda deliver: deliver(self._snapshot()))
        self._statistics.counts = collect

    def _add_operations(self) -> None:
        adapters, jobs, placement = self._adapters, self._jobs, self._placement
        for name, operation in {
            "join": self._members.join,
            "watch": self._watch,
            "launch": self._launch,
            "drain": self._drain,
            "store": self._describe_store,
            "place": placement.place,
            "progress": placement.progress,
            "load": adapters.load,
            "unload": adapters.unload,
            "pin": adapters.pin,
            "stats": self._statistics.stats,
            "train": jobs.train,
            "stop_training": jobs.stop_training,
            "check_adapter": jobs.check,
            "check_job": jobs.check,
        }.items():
            self._operations.add(name, operation)
        self._operations.on_lost_peer(self._drop_peer)

    async def run(self, stopped: asyncio.Event) -> None:
        last_tick_s = 0.0
        while not stopped.is_set():
            self._placement.dispatch()
            if time.monotonic() - last_tick_s >= _TICK_S:
                last_tick_s = time.monotonic()
                await self._statistics.poll()
                await self._jobs.move()
                if time.monotonic() - self._started >= _SETTLE_S:
                    self._tick()
            try:
                await asyncio.wait_for(stopped.wait(), _DISPATCH_S)
            except TimeoutError:
                continue

    async def close(self) -> None:
        await asyncio.gather(*self._operations.stop(), return_exceptions=True)
        await asyncio.to_thread(self.rpc.close)
        await self._members.close()

    def _tick(self) -> None:
        decisions = self._placement.tick()
        left = [member.name for member in self._members.by_name.values() if member.number in decisions.release]
        if decisions.start or left:
            self._leaving |= set(left)
            self.wanted += decisions.start - len(left)
            self._tell_launchers()
        elif self._find_hung():
            self._tell_launchers()

    def _find_hung(self) -> list[str]:
        now, hung_s = time.monotonic(), self._config.hung_s
        self._missing = {name: since for name, since in self._missing.items() if now - since < hung_s + _FORGET_S}
        return sorted(name for name, since in self._missing.items() if now - since >= hung_s)

    # Engines

    def _add_engine(self, member: Member) -> None:
        self._missing.pop(member.name, None)
        self._placement.add_engine(member)

    def _drop_engine(self, member: Member) -> None:
        is_replaced = member.name not in self._leaving
        self._leaving.discard(member.name)
        self._lost += is_replaced
        if is_replaced:
            self._missing[member.name] = time.monotonic()
        self._placement.drop_engine(member, expected=self._expected if is_replaced else 0)

    async def _drain(self, id: str, body: Body) -> Body:
        """An engine leaves: its requests end or move, and it is replaced. Raises if there is no such engine."""
        name = text_field(body, "engine", 200)
        member = self._members.by_name.get(name)
        if member is None:
            raise UnknownEngine(f"there is no engine {name!r}: expected one of {', '.join(sorted(self._members.by_name))}")
        self._placement.drain(member, is_replaced=True)
        self.wanted += 1  # until it has left
        self._tell_launchers()
        return {}

    def _least_loaded(self) -> Member:
        members = [member for member in self._members.by_name.values() if member.client.is_alive()]
        if not members:
            raise EngineLost("no engine of the cluster is there: try again in a moment")
        return min(members, key=lambda member: (member.stats.get("running", 0), member.name))

    # HTTP processes and launchers: their operations stay open, and events follow

    async def _watch(self, id: str, body: Body) -> None:
        """The table of engines, now and after each change; again if it is asked for with the same id."""
        self._watches[id] = None
        self.rpc.publish([JobEvent(id, self._table())])

    async def _launch(self, id: str, body: Body) -> None:
        engines = int_field(body.get("engines", 0), "engines")
        if not 0 <= engines <= _MAX_JOINED:
            raise BadMessage(f"engines: expected 0 to {_MAX_JOINED}")
        self._launchers[id] = engines
        self._resize()
        self._tell_launchers()

    async def _describe_store(self, id: str, body: Body) -> Body:
        return {"url": self._config.store}

    def _resize(self) -> None:
        config, joined = self._config, sum(self._launchers.values())
        most = config.max_engines or config.engines
        self._placement.resize(min_engines=config.engines + joined, max_engines=most + joined, expected=self._expected)

    @property
    def _expected(self) -> int:
        return self.wanted + sum(self._launchers.values())

    def _snapshot(self) -> dict[str, Any]:
        statistics = self._statistics.snapshot(self._config.has_keys)
        statistics["cluster"] |= {"wanted": self._expected, "lost": self._lost}
        statistics["cluster"] |= {"jobs_waiting": self._jobs.num_waiting, "jobs_moved": self._jobs.num_moved}
        return statistics

    def _changed(self) -> None:
        self.rpc.publish([JobEvent(id, self._table()) for id in self._watches])

    def _tell_launchers(self) -> None:
        wish = {"wanted": self.wanted, "leave": sorted(self._leaving), "hung": self._find_hung()}
        self.rpc.publish([JobEvent(id, wish) for id in self._launchers])

    def _move(self, peer: str, placement: int) -> None:
        self.rpc.publish([JobEvent(id, {"move": [placement]}) for id in self._watches if id.startswith(f"{peer}:")])

    def _table(self) -> dict[str, Any]:
        model = self._members.model
        return {
            "engines": {name: member.address.to_json() for name, member in self._members.by_name.items()},
            "model": model,
            "facts": [
                {
                    "max_model_len": member.facts.max_model_len,
                    "max_training_len": member.facts.max_training_len,
                    "training_error": member.facts.training_error,
                    "default_sampling": member.facts.default_sampling,
                    "tokenizer": member.facts.tokenizer,
                }
                for member in list(self._members.by_name.values())[:1]
            ],
        }

    def _drop_peer(self, peer: str) -> None:
        for id in [id for id in self._watches if id.startswith(f"{peer}:")]:
            del self._watches[id]
        if any([self._launchers.pop(id) for id in list(self._launchers) if id.startswith(f"{peer}:")]):
            self._resize()
        self._placement.drop_peer(peer)
