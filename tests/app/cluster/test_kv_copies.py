"""Requests that move in a cluster take their keys and values along: the tokens of an undisturbed run, whatever fails."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from transformers import AutoModelForCausalLM

from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from tests.app.cluster.running_cluster import RunningCluster
from tests.lora import ALL_LINEAR, with_random_lora

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT, TOKENS, CUT = 2500, 60, 20
SAMPLINGS = [
    Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    Sampling(seed=7, max_tokens=TOKENS, ignore_eos=True),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    made = RunningCluster(folder, max_length=4096)
    with_random_lora(AutoModelForCausalLM.from_pretrained(made.model), tuple(ALL_LINEAR)).save_pretrained(folder / "lora")
    made.host.ask("load", name="pirate", folder=str(folder / "lora"), replace=True)
    yield made
    made.close()


def request(seed: int, number: int) -> GenerateRequest:
    """With and without an adapter, greedy and seeded, n = 1 and 4."""
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 100) for _ in range(PROMPT)]
    sampling, adapter = SAMPLINGS[number // 2 % 2], "pirate" if number >= 4 else None
    return GenerateRequest(prompt=prompt, sampling=sampling, tenant="ann", n=1 + 3 * (number % 2), adapter=adapter)


async def generate(client: ClusterClient, request: GenerateRequest, leave=None) -> list[list[int]]:
    """After some tokens `leave` is called, with the request's id and the name of its engine."""
    tokens: list[list[int]] = [[] for _ in range(request.n)]
    has_left = leave is None
    async with client.submit([request]) as active:
        async for events in active.events():
            for _, event in events:
                if isinstance(event, Token):
                    tokens[event.number].append(event.token)
                else:
                    assert isinstance(event, Finished)
                    assert event.error is None
            if not has_left and len(tokens[0]) >= CUT:
                has_left = True
                ((id, placement),) = client._placements.items()
                leave(id, placement.engine)
    return tokens


async def count_fetched(served: RunningCluster) -> dict[str, int]:
    """Blocks by engine."""
    await asyncio.sleep(1.5)  # statistics of engines are a second old
    return {name: row["blocks_fetched"] for name, row in served.engines().items()}


async def move_until_blocks_are_copied(served: RunningCluster, client: ClusterClient, number: int, leave) -> None:
    before = await count_fetched(served)
    for seed in range(10):  # a fast engine may compute its prompt before the first block comes
        asked = request(100 * number + seed, number)
        moved = await generate(client, asked, leave)
        after = await count_fetched(served)
        await served.wait_for_engines(client)
        assert moved == await generate(client, asked)
        if any(count > before.get(name, 0) for name, count in after.items()):
            return
    pytest.fail("no block was copied")


async def connect(served: RunningCluster) -> ClusterClient:
    client = served.link()
    await client.start()
    await served.wait_for_engines(client)
    return client


@pytest.mark.parametrize("number", [0, 3, 5, 6])
def test_a_request_that_moves_has_the_tokens_of_an_undisturbed_one(served, number):
    async def run() -> None:
        client = await connect(served)
        await move_until_blocks_are_copied(served, client, number, lambda id, engine: client.report_pressure(id))
        await client.close()

    asyncio.run(run())
    assert served.metric("symbiosis_kv_cache_blocks_fetched") > 0
    assert served.metric("symbiosis_kv_cache_blocks_sent") > 0


def test_requests_take_their_blocks_from_an_engine_that_ends(served):
    def stop(id: str, engine: str) -> None:
        os.kill(served.host.launcher.pids[engine], signal.SIGTERM)

    async def run() -> None:
        client = await connect(served)
        await move_until_blocks_are_copied(served, client, 3, stop)
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_the_engine_that_a_request_has_left_fails_in_mid_copy(served, fault):
    async def run() -> None:
        client, pids = await connect(served), []

        def leave(id: str, engine: str) -> None:
            client.report_pressure(id)
            pids.append(served.host.launcher.pids[engine])
            os.kill(pids[-1], {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault])

        for number in (0, 3):
            asked = request(1000 + number, number)
            moved = await generate(client, asked, leave)
            if fault == "freeze":
                os.kill(pids[-1], signal.SIGCONT)
            await served.wait_for_engines(client)
            assert moved == await generate(client, asked)
        await client.close()

    asyncio.run(run())
