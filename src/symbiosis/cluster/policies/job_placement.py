"""Placement of fine-tuning jobs next to serving: on engines that serving leaves room on, and away from them when it returns.

A job takes memory of a device for as long as it runs, and a share of its time. It goes to the ready engine with the most room
whose serving load is below `max_load`, so that consolidation keeps filling the other engines first. A job is moved (stopped at
its checkpoint) when the load of its engine stays above `evict_load`.

No job starves where all engines are busy for ever: after `max_wait_s` it goes to the least loaded engine, and load does not
move it from there. Each engine bounds the share of its time that training takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from symbiosis.cluster.policies.cluster_state import ClusterState, EngineStatus

_FORGET_S = 60.0
"""A job that was not asked for again within this time does not wait any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Bounds of the load next to jobs."""

    max_load: float = 0.4
    """Serving load of an engine that may take a job."""
    evict_load: float = 0.9
    """Serving load that makes a job leave. Well above `max_load`: jobs do not move back and forth."""
    evict_after_s: float = 10.0
    """It leaves after so long at that load."""
    max_wait_s: float = 300.0
    """A job that has waited for longer starts at any load."""
    jobs_per_engine: int = 4


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One fine-tuning job, and its memory on the device in tokens of KV cache."""

    id: str
    kv_tokens: int
    is_overdue: bool = False
    """It has waited for `max_wait_s`: the load of engines neither keeps it waiting nor moves it."""


Running = Mapping[int, list[ClusterJob]]
"""Jobs by engine number."""


def place_job(
    job: ClusterJob, state: ClusterState, running: Running, config: JobConfig, trains: Collection[int] | None = None
) -> int | None:
    """The engine for a job, or None if it has to wait. `trains`: the engines that can train; None: all."""
    keys: list[tuple[int, float, int]] = []
    for number, engine in state.engines.items():
        jobs = running.get(number, [])
        if engine.status is not EngineStatus.READY or len(jobs) >= config.jobs_per_engine:
            continue
        if trains is not None and number not in trains:
            continue
        load, free = engine.load(), engine.kv_tokens - sum(each.kv_tokens for each in jobs)
        if job.is_overdue:
            if free >= job.kv_tokens:
                keys.append((len(jobs), load, number))
        elif load <= config.max_load and free - engine.kv_reserved >= job.kv_tokens:
            # Fewest jobs first, then the fullest of these engines: idle engines stay free to leave.
            keys.append((len(jobs), -load, number))
    return min(keys)[2] if keys else None


def jobs_to_move(
    state: ClusterState, running: Running, config: JobConfig, overloaded: Collection[int] | None = None
) -> list[ClusterJob]:
    """Jobs that leave their engine: it is full, drains, or is gone. The smallest of each engine first.

    `overloaded`: the engines that have been full for long enough; None: all that are full now.
    """
    moved: list[ClusterJob] = []
    for number, jobs in running.items():
        engine = state.engines.get(number)
        if engine is None or engine.status is not EngineStatus.READY:
            moved += jobs
        elif engine.load() > config.evict_load and (overloaded is None or number in overloaded):
            movable = [job for job in jobs if not job.is_overdue]
            if movable:
                moved.append(min(movable, key=lambda job: (job.kv_tokens, job.id)))
    return moved


class JobPolicy:
    """Places jobs and moves them: how long each has waited, and how long engines have been full. Not thread-safe."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self._waiting: dict[str, tuple[float, float]] = {}
        """When a job was first and last asked for, by its id."""
        self._full_since: dict[int, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def place(
        self, job: ClusterJob, state: ClusterState, running: Running, trains: Collection[int], now: float
    ) -> tuple[int, ClusterJob] | None:
        """The engine, and the job as it runs there. None: it has to wait, and is asked for again."""
        self._forget(now)
        since = self._waiting.get(job.id, (now, now))[0]
        if now - since >= self.config.max_wait_s:
            job = ClusterJob(job.id, job.kv_tokens, is_overdue=True)
        number = place_job(job, state, running, self.config, trains)
        if number is None:
            self._waiting[job.id] = since, now
            return None
        self._waiting.pop(job.id, None)
        return number, job

    def tick(self, state: ClusterState, running: Running, now: float) -> list[ClusterJob]:
        """Once a second: the jobs that leave their engine now."""
        self._forget(now)
        full = [number for number, engine in state.engines.items() if engine.load() > self.config.evict_load]
        self._full_since = {number: self._full_since.get(number, now) for number in full}
        before = now - self.config.evict_after_s
        moved = jobs_to_move(state, running, self.config, [number for number in full if self._full_since[number] <= before])
        for number in {number for number, jobs in running.items() for job in jobs if job in moved}:
            self._full_since.pop(number, None)  # what is left gets as long
        return moved

    def _forget(self, now: float) -> None:
        gone = [id for id, (_, last) in self._waiting.items() if last + _FORGET_S < now]
        for id in gone:
            del self._waiting[id]
