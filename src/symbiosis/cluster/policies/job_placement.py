"""Placement of fine-tuning jobs next to serving: on engines that serving leaves room on, and away from them when it returns.

A job takes memory of a device for as long as it runs, and a share of its time. It goes to the ready engine with the most room
whose serving load is below `max_load`, so that consolidation keeps filling the other engines first. A job is moved (stopped at
its checkpoint) when the load of its engine stays above `evict_load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from symbiosis.cluster.policies.cluster_state import ClusterState, EngineStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Bounds of the load next to jobs."""

    max_load: float = 0.4
    """Serving load of an engine that may take a job."""
    evict_load: float = 0.9
    """Serving load that makes a job leave. Well above `max_load`: jobs do not move back and forth."""
    jobs_per_engine: int = 4


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One fine-tuning job, and its memory on the device in tokens of KV cache."""

    id: str
    kv_tokens: int


def place_job(job: ClusterJob, state: ClusterState, running: Mapping[int, list[ClusterJob]], config: JobConfig) -> int | None:
    """The engine for a job, or None if it has to wait. `running` are the jobs by engine number."""
    best: tuple[int, float, int] | None = None
    for number, engine in state.engines.items():
        jobs = running.get(number, [])
        free = engine.kv_tokens - engine.kv_reserved - sum(each.kv_tokens for each in jobs)
        if engine.status is not EngineStatus.READY or len(jobs) >= config.jobs_per_engine:
            continue
        if engine.load() <= config.max_load and free >= job.kv_tokens:
            # Fewest jobs first, then the fullest of these engines: idle engines stay free to leave.
            key = (len(jobs), -engine.load(), number)
            best = key if best is None else min(best, key)
    return None if best is None else best[2]


def jobs_to_move(state: ClusterState, running: Mapping[int, list[ClusterJob]], config: JobConfig) -> list[ClusterJob]:
    """Jobs that leave their engine: it is full, drains, or is gone. The smallest of each engine first."""
    moved: list[ClusterJob] = []
    for number, jobs in running.items():
        engine = state.engines.get(number)
        if engine is None or engine.status is not EngineStatus.READY:
            moved += jobs
        elif jobs and engine.load() > config.evict_load:
            moved.append(min(jobs, key=lambda job: (job.kv_tokens, job.id)))
    return moved
