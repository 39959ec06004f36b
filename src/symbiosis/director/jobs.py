"""Fine-tuning jobs of a cluster: each runs on one engine; its events pass through the director."""

from __future__ import annotations

import logging
from contextlib import suppress

from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.members import Member, Members
from symbiosis.errors import CannotTrain, EngineLost
from symbiosis.server.engines.rpc_client import Inbox
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import JobEvent, Rejected
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.engine_ipc import Body

_ENDS = ("trained", "stopped", "failed")
_log = logging.getLogger("symbiosis")


class ClusterJobs:
    """A job whose engine is lost ends as one that found no room: its HTTP process queues it again, from its last checkpoint."""

    def __init__(self, rpc: RpcServer, members: Members, adapters: ClusterAdapters) -> None:
        self._rpc, self._members, self._adapters = rpc, members, adapters
        self._runs: dict[str, tuple[Member, str]] = {}
        """Engine and id there, by the id of the operation."""

    async def train(self, id: str, body: Body) -> None:
        """Until the job has ended."""
        member = self._choose()
        name = body.get("serve_as")
        inbox = Inbox()
        own = await member.client.open({key: value for key, value in body.items() if key != "id"}, inbox)
        self._runs[id] = member, own
        member.jobs += 1
        try:
            while True:
                for raw in await inbox.take():
                    if raw is None:
                        raise EngineLost("the job's engine is lost: it goes on elsewhere, from its last checkpoint")
                    event = messages.decode_event(raw)
                    if isinstance(event, Rejected):
                        raise event.error
                    assert isinstance(event, JobEvent)
                    kind, fields = next(iter(event.body["training"].items()))
                    if isinstance(name, str) and fields.get("folder") and (kind == "trained" or fields.get("serves")):
                        self._adapters.put(name, str(fields["folder"]), str(fields["hash"]), member)
                    self._rpc.publish([JobEvent(id, {"training": event.body["training"]})])
                    if kind in _ENDS:
                        return
        finally:
            member.jobs -= 1
            del self._runs[id]
            member.client.forget(own)
            if member.client.is_alive():  # no effect on a job that has ended
                await member.client.stop_training(own, at_once=True)

    async def stop_training(self, id: str, body: Body) -> None:
        run = self._runs.get(id)
        if run is not None:
            with suppress(EngineLost):
                await run[0].client.stop_training(run[1], at_once=body.get("at_once") is True)

    async def check(self, id: str, body: Body) -> Body:
        """`check_adapter` and `check_job`, by an engine that trains."""
        fields = {name: value for name, value in body.items() if name not in ("id", "op")}
        return await self._choose().client.ask(body["op"], **fields)

    def _choose(self) -> Member:
        """The engine with the fewest jobs, then with the fewest sequences."""
        members = [member for member in self._members.by_name.values() if member.client.is_alive()]
        training = [member for member in members if member.facts.training_error is None]
        if training:
            return min(training, key=lambda member: (member.jobs, member.stats.get("running", 0), member.name))
        if members:
            raise CannotTrain(str(members[0].facts.training_error))
        raise EngineLost("no engine of the cluster is there: try again in a moment")
