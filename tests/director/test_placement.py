"""What a director makes of the messages of HTTP processes: owners of prefixes, preemptions, engines out of reach."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from symbiosis.director.placement import Placement
from symbiosis.errors import BadMessage
from symbiosis.server.engines.prompt_blocks import BLOCK_TOKENS, hash_blocks
from tests.director.test_joined_engines import FACTS, Cluster

PROMPT = list(range(3 * BLOCK_TOKENS))


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 3)
    made.moves = []
    made.placement._move = lambda peer, number: made.moves.append((peer, number))
    for name in ("a", "b", "c"):
        made.join(name)
    return made


async def place(placement: Placement, peer: str = "1", **more: Any) -> tuple[str, int]:
    body = {"op": "place", "tenant": "ann", "adapter": None, "prompt": 3, "generated": 0, "moved": 0, **more}
    reply = await placement.place(f"{peer}:0", body)
    return reply["engine"], reply["placement"]


def long_prompt(tenant: str) -> dict[str, Any]:
    return {"tenant": tenant, "prompt": len(PROMPT), "blocks": hash_blocks(PROMPT, tenant, None)}


def test_a_prompt_goes_where_its_beginning_was_placed(cluster):
    async def run() -> None:
        placement = cluster.placement
        first, number = await place(placement)
        owner, owned = await place(placement, **long_prompt("ann"))
        assert (first, owner) == ("a", "b")
        for each in (number, owned):
            await placement.progress("1:0", {"ended": [[each, 5]]})
        assert (await place(placement, peer="2", **long_prompt("ann")))[0] == "b"  # from another HTTP process, too
        assert (await place(placement, **long_prompt("bob")))[0] == "a"  # another tenant's equal prompt
        cluster.members._leave(cluster.members.by_name["b"])
        assert (await place(placement, **long_prompt("ann")))[0] == "c"
        new = cluster.join("d")
        assert new.number == 3
        placement.policy.state.check_integrity()

    asyncio.run(run())


def test_a_preempted_request_moves_once_to_an_engine_with_room(cluster):
    async def run() -> None:
        placement = cluster.placement
        engine, number = await place(placement)
        await placement.progress("2:0", {"preempted": [number]})  # another process has no such request
        assert cluster.moves == []
        await placement.progress("1:0", {"preempted": [number, number, 77]})
        await placement.progress("1:0", {"preempted": [number]})
        assert cluster.moves == [("1", number)]
        other, same = await place(placement, moved=number, generated=40)
        assert other != engine
        assert same == number
        await placement.progress("1:0", {"preempted": [number]})
        assert cluster.moves == [("1", number)] * 2
        await placement.progress("1:0", {"ended": [[number, 50]]})
        assert placement.stats()["placed"] == 0
        assert not placement._moving
        placement.policy.state.check_integrity()

    asyncio.run(run())


def test_a_request_stays_where_all_engines_are_full(cluster):
    async def run() -> None:
        placement = cluster.placement
        numbers = [(await place(placement))[1] for _ in range(12)]  # 4 of at most 1000 tokens on each
        await placement.progress("1:0", {"preempted": numbers})
        assert cluster.moves == []
        placement.policy.state.check_integrity()

    asyncio.run(run())


def test_an_engine_of_unknown_speed_takes_all_that_it_has_room_for(tmp_path):
    cluster = Cluster(tmp_path, 1)
    cluster.join("a", replace(FACTS, kv_tokens=10**7, max_running=1000))

    async def run() -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*(place(cluster.placement, prompt=4000) for _ in range(1000)))
        assert len(cluster.placement.policy.state.engines[0].requests) == 1000

    asyncio.run(run())


def test_an_engine_out_of_reach_is_chosen_last(cluster):
    async def run() -> None:
        placement = cluster.placement
        engine, number = await place(placement, unreachable=["a", "gone"])
        assert engine == "b"
        engine, number = await place(placement, moved=number, unreachable=["a", "b"])
        assert engine == "c"
        assert (await place(placement, moved=number, unreachable=["a", "b", "c"]))[0] in "abc"

    asyncio.run(run())


def test_an_engine_that_has_the_prompt_and_is_not_chosen_is_named_as_its_source(cluster):
    async def run() -> None:
        placement = cluster.placement
        body = {"op": "place", "adapter": None, "generated": 0, "moved": 0}
        owner, number = await place(placement, **long_prompt("ann"))
        await placement.progress("1:0", {"ended": [[number, 5]]})
        again = await placement.place("1:0", body | long_prompt("ann"))
        assert (again["engine"], again["source"]) == (owner, None)
        other = await placement.place("1:0", body | long_prompt("ann"))  # the owner is busy
        assert other["engine"] != owner
        assert other["source"] == owner
        await placement.progress("1:0", {"ended": [[other["placement"], 5]]})
        copied = await placement.place("1:0", body | long_prompt("ann"))  # the other engine has it, too
        assert (copied["engine"], copied["source"]) == (other["engine"], None)
        assert (await placement.place("1:0", body | long_prompt("bob")))["source"] is None
        assert (await placement.place("1:0", body | {"tenant": "ann", "prompt": 3}))["source"] is None

    asyncio.run(run())


def test_an_engine_out_of_reach_is_no_source(cluster):
    async def run() -> None:
        placement = cluster.placement
        owner, _ = await place(placement, **long_prompt("ann"))
        body = {"op": "place", "adapter": None, "generated": 0, "moved": 0, "unreachable": [owner]}
        reply = await placement.place("1:0", body | long_prompt("ann"))
        assert reply["engine"] != owner
        assert reply["source"] is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "more", [{"blocks": [-1]}, {"blocks": "x"}, {"blocks": [1 << 64]}, {"blocks": [0] * 300}, {"unreachable": [3]}]
)
def test_broken_messages_are_rejected(cluster, more):
    with pytest.raises(BadMessage):
        asyncio.run(place(cluster.placement, **more))
