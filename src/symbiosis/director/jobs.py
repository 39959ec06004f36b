"""Fine-tuning jobs of a cluster: each runs on one engine, which the policy chooses; its events pass through the director."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from symbiosis.cluster.policies.job_placement import ClusterJob, JobConfig, JobPolicy
from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.members import Member, Members
from symbiosis.director.placement import Placement
from symbiosis.errors import CannotTrain, EngineLost, TooManyRequests
from symbiosis.server.engines.rpc_client import Inbox
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import JobEvent, Rejected, text_field
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.engine_ipc import Body

_ENDS = ("trained", "stopped", "failed")
_MAX_NAME = 600
_NO_ENGINE = -1
"""Number of an engine that the policy has released."""


@dataclass(slots=True, eq=False)
class _Run:
    """A job at an engine."""

    member: Member
    job: ClusterJob
    id: str = ""
    """At the engine."""
    is_moving: bool = False


class ClusterJobs:
    """A job whose engine is lost, or that has to wait, ends as one that found no room: its HTTP process queues it again.

    It goes on from its last checkpoint. A job that leaves its engine is stopped after its current step, with a checkpoint.
    """

    def __init__(
        self, rpc: RpcServer, members: Members, adapters: ClusterAdapters, placement: Placement, config: JobConfig
    ) -> None:
        self._rpc, self._members, self._adapters, self._placement = rpc, members, adapters, placement
        self._policy = JobPolicy(config)
        self._runs: dict[str, _Run] = {}
        """By the id of the operation."""
        self.num_moved = 0

    @property
    def num_waiting(self) -> int:
        """Jobs that found no engine."""
        return self._policy.num_waiting

    async def train(self, id: str, body: Body) -> None:
        """Until the job has ended. Raises `TooManyRequests` if it has to wait."""
        name = text_field(body, "serve_as", _MAX_NAME) if body.get("serve_as") is not None else None
        run = self._runs[id] = self._place(name or id)
        member = run.member
        member.jobs += 1
        inbox = Inbox()
        try:
            run.id = await member.client.open({key: value for key, value in body.items() if key != "id"}, inbox)
            while True:
                for raw in await inbox.take():
                    if raw is None:
                        raise EngineLost("the job's engine is lost: it goes on elsewhere, from its last checkpoint")
                    event = messages.decode_event(raw)
                    if isinstance(event, Rejected):
                        raise event.error
                    assert isinstance(event, JobEvent)
                    kind, fields = next(iter(event.body["training"].items()))
                    if name is not None and fields.get("folder") and (kind == "trained" or fields.get("serves")):
                        self._adapters.put(name, str(fields["folder"]), str(fields["hash"]), member)
                    self._rpc.publish([JobEvent(id, {"training": event.body["training"]})])
                    if kind in _ENDS:
                        return
        finally:
            member.jobs -= 1
            del self._runs[id]
            if run.id:
                member.client.forget(run.id)
                if member.client.is_alive():  # no effect on a job that has ended
                    await member.client.stop_training(run.id, at_once=True)

    async def stop_training(self, id: str, body: Body) -> None:
        run = self._runs.get(id)
        if run is not None and run.id:
            with suppress(EngineLost):
                await run.member.client.stop_training(run.id, at_once=body.get("at_once") is True)

    async def check(self, id: str, body: Body) -> Body:
        """`check_adapter` and `check_job`, by an engine that trains."""
        fields = {name: value for name, value in body.items() if name not in ("id", "op")}
        member = min(self._training(), key=lambda member: (member.jobs, member.stats.get("running", 0), member.name))
        return await member.client.ask(body["op"], **fields)

    async def move(self) -> None:
        """Once a second: stop the jobs whose engines are full or leave. They end with a checkpoint, and are queued again."""
        if self._placement.policy is None:
            return
        state = self._placement.policy.state
        leaving = {job.id for job in self._policy.tick(state, self._by_number(), time.monotonic())}
        for run in list(self._runs.values()):
            if run.job.id in leaving and run.id and not run.is_moving:
                run.is_moving = True
                self.num_moved += 1
                with suppress(EngineLost):
                    await run.member.client.stop_training(run.id)

    def _place(self, name: str) -> _Run:
        training, policy = self._training(), self._placement.policy
        assert policy is not None  # there is an engine
        trains = {member.number for member in training if self._number(member) != _NO_ENGINE}
        now = time.monotonic()
        found = self._policy.place(ClusterJob(name, 0), policy.state, self._by_number(), trains, now)
        if found is None:
            raise TooManyRequests("all engines of the cluster are busy: the job waits until one has room for it")
        number, job = found
        return _Run(self._members.by_number[number], job)

    def _training(self) -> list[Member]:
        """Engines that train. Raises `CannotTrain`, or `EngineLost` if there is no engine."""
        members = [member for member in self._members.by_name.values() if member.client.is_alive()]
        training = [member for member in members if member.facts.training_error is None]
        if members and not training:
            raise CannotTrain(str(members[0].facts.training_error))
        if not training:
            raise EngineLost("no engine of the cluster is there: try again in a moment")
        return training

    def _by_number(self) -> dict[int, list[ClusterJob]]:
        running: dict[int, list[ClusterJob]] = {}
        for run in self._runs.values():
            if not run.is_moving:
                running.setdefault(self._number(run.member), []).append(run.job)
        return running

    def _number(self, member: Member) -> int:
        return member.number if self._members.by_number.get(member.number) is member else _NO_ENGINE
