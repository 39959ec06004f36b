"""Engines and a director in real processes: whatever dies, each completion has exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import random

import pytest

from symbiosis.errors import EngineLost, UnknownAdapter
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.engine_ipc import ClusterKey
from tests.app.cluster.running_cluster import RunningCluster
from tests.tiny_chat import make_tiny_chat

TOKENS = 40


def requests() -> list[GenerateRequest]:
    samplings = [
        Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True),
        Sampling(seed=7, max_tokens=TOKENS, ignore_eos=True),
        Sampling(seed=8, max_tokens=TOKENS, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5),
        Sampling(seed=9, max_tokens=TOKENS, ignore_eos=True, logprobs=2),
    ]
    return [
        GenerateRequest(prompt=[3 + number, 5, 7 + number], sampling=samplings[number % 4], n=1 + 3 * (number % 2))
        for number in range(8)
    ]


async def complete(client: ClusterClient, request: GenerateRequest) -> tuple[list[list[int]], list[str]]:
    tokens, ends = [[] for _ in range(request.n)], [""] * request.n
    async with client.submit([request]) as active:
        async for events in active.events():
            for _, event in events:
                if isinstance(event, Token):
                    assert not ends[event.number]
                    tokens[event.number].append(event.token)
                    assert (event.logprobs is not None) == (request.sampling.logprobs is not None)
                else:
                    assert isinstance(event, Finished)
                    ends[event.number] = event.reason.value
    return tokens, ends


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    made = RunningCluster(make_tiny_chat(folder / "tiny"), folder / "state", 2)
    yield made
    made.close()


async def run(cluster: RunningCluster, faults: list[str]) -> None:
    client = cluster.client()
    await client.start()
    await cluster.wait_for_engines(client)
    expected = await asyncio.gather(*(complete(client, request) for request in requests()))
    assert all(ends == ["length"] * len(tokens) and {len(each) for each in tokens} == {TOKENS} for tokens, ends in expected)
    chosen = random.Random(1)
    is_over = False

    async def ask(number: int) -> int:
        count = 0
        while not is_over or not count:
            index = (number + count) % len(expected)
            assert await complete(client, requests()[index]) == expected[index]
            count += 1
        return count

    async def disturb() -> None:
        nonlocal is_over
        try:
            for fault in faults:
                await asyncio.sleep(chosen.uniform(0.05, 0.4))
                await cluster.disturb(client, chosen.choice(client.engines), fault)
        finally:
            is_over = True

    *counts, _ = await asyncio.gather(*(ask(number) for number in range(len(expected))), disturb())
    assert all(counts)
    while (stats := (await client.ask("statistics"))["cluster"])["placed"]:  # nothing stays at the director
        assert not stats["waiting"]
        await asyncio.sleep(0.1)
    await client.close()


@pytest.mark.timeout(600)
def test_no_token_is_lost_or_doubled_when_engines_or_the_director_fail(cluster):
    asyncio.run(run(cluster, ["director", "kill", "stop", "freeze", "director"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_faults(cluster):
    asyncio.run(run(cluster, ["kill", "director", "stop", "freeze"] * 25))


@pytest.mark.timeout(600)
def test_requests_that_cannot_be_placed_say_why(cluster):
    async def ask() -> None:
        client = cluster.client()
        await client.start()
        await cluster.wait_for_engines(client)
        with pytest.raises(UnknownAdapter, match="no adapter 'missing'"):
            await complete(client, GenerateRequest(prompt=[3], adapter="missing", tenant="ann"))
        assert (await client.ask("statistics"))["cluster"]["placed"] == 0
        await client.close()

    asyncio.run(ask())


def test_a_request_that_ends_while_it_waits_for_an_engine_leaves_the_director(tmp_path):
    lonely = RunningCluster(tmp_path / "none", tmp_path / "state", 0)

    async def ask() -> None:
        client = lonely.client(patience_s=0.3)
        await client.start()
        with pytest.raises(EngineLost, match="no engine of the cluster"):
            await complete(client, requests()[0])
        await asyncio.sleep(0.2)
        assert (await client.ask("statistics"))["cluster"] == {"waiting": 0, "migrations": 0, "placed": 0}
        await client.close()

    asyncio.run(ask())
    lonely.close()


def test_another_key_is_not_served(cluster):
    async def ask() -> None:
        client = ClusterClient(cluster.director.address, ClusterKey.of("a stranger's secret"), patience_s=1.0)
        with pytest.raises(EngineLost, match="the director of the cluster cannot be reached"):
            await client.start()
        await client.close()

    asyncio.run(ask())
