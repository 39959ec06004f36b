"""The number of engines that a director counts on, while launchers of other hosts come and go."""

from __future__ import annotations

from typing import Any, cast

import pytest

from symbiosis.cluster.policies.cluster_state import EngineStatus
from symbiosis.cluster.policies.policy import PolicyConfig
from symbiosis.cluster.policies.scaling import ScalingConfig
from symbiosis.director.adapters import ClusterAdapters
from symbiosis.director.members import EngineFacts, Member, Members
from symbiosis.director.placement import Placement
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress

FACTS = EngineFacts(
    slots=4,
    kv_tokens=1000,
    max_running=8,
    max_model_len=100,
    max_training_len=None,
    training_error=None,
    default_sampling={},
    tokenizer=None,
)
_KEY = ClusterKey.of("a secret of a test")


class Cluster:
    """A placement and its members, without their links."""

    def __init__(self, tmp_path: Any, engines: int) -> None:
        self.members = Members(_KEY, None, lambda: None)
        adapters = ClusterAdapters(self.members, tmp_path / "adapters.json", lambda: pytest.fail("no engine is asked"))
        config = PolicyConfig(scale=True, scaling=ScalingConfig(min_engines=engines, max_engines=engines))
        self.placement = Placement(config, None, self.members, adapters, lambda peer, number: None, engines=engines)
        self.expected = self.engines = engines
        self.members.on_joined = self.placement.add_engine
        self.members.on_lost = lambda member: self.placement.drop_engine(member, expected=self.expected)

    def join(self, name: str, facts: EngineFacts = FACTS) -> Member:
        member = Member(name, EngineAddress("", ""), facts, cast(Any, None))
        self.members.by_name[name] = member
        self.members.on_joined(member)
        self.members.by_number[member.number] = member
        return member

    def launch(self, joined: int) -> None:
        self.expected = most = self.engines + joined
        self.placement.resize(min_engines=most, max_engines=most, expected=most)

    def count(self, status: EngineStatus) -> int:
        assert self.placement.policy is not None
        return sum(engine.status is status for engine in self.placement.policy.state.engines.values())

    def decisions(self) -> list[int]:
        """Engines started minus engines drained by two minutes of ticks."""
        found = []
        for _ in range(120):
            before = self.count(EngineStatus.READY)
            decisions = self.placement.tick()
            found.append(decisions.start - (before - self.count(EngineStatus.READY)))
        return found


def test_joined_engines_are_neither_drained_nor_started_a_second_time(tmp_path):
    cluster = Cluster(tmp_path, 1)
    cluster.join("own")
    cluster.launch(2)
    assert cluster.count(EngineStatus.STARTING) == 2
    for name in ("there-1", "there-2"):
        cluster.join(name)
    assert cluster.count(EngineStatus.READY) == 3
    assert cluster.count(EngineStatus.STARTING) == 0
    assert not any(cluster.decisions())


@pytest.mark.parametrize("engines_first", [False, True])
def test_after_a_host_has_left_the_others_stay(tmp_path, engines_first):
    cluster = Cluster(tmp_path, 1)
    cluster.launch(1)
    cluster.join("own")
    joined = cluster.join("there")
    for what in (True, False) if engines_first else (False, True):
        if what:
            cluster.members._leave(joined)
        else:
            cluster.launch(0)
    assert not any(cluster.decisions())
    assert cluster.count(EngineStatus.READY) == 1
    assert cluster.count(EngineStatus.STARTING) == 0


def test_the_number_of_a_released_engine_may_belong_to_another(tmp_path):
    cluster = Cluster(tmp_path, 2)
    old, other = cluster.join("old"), cluster.join("other")
    policy = cluster.placement.policy
    assert policy is not None
    cluster.placement.drain(old, is_replaced=False)
    cluster.placement.tick()
    new = cluster.join("new")
    assert new.number == old.number
    cluster.members._leave(old)
    assert cluster.members.by_number == {new.number: new, other.number: other}
    assert cluster.count(EngineStatus.READY) == 2
    cluster.members._leave(new)
    assert cluster.members.by_number == {other.number: other}
