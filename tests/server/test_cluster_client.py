"""Engines of a cluster in real processes: whatever dies, each completion has exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal

import pytest

from symbiosis.errors import EngineLost
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.engine_ipc import ClusterKey
from tests.server.engine_process import EngineProcess

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


class Cluster:
    """Engines that are replaced when they have been killed or stopped."""

    def __init__(self, count: int) -> None:
        self.secret = secrets.token_hex(16)
        self.processes = {f"e{number}": EngineProcess(self.secret) for number in range(count)}
        self.addresses = {name: process.address() for name, process in self.processes.items()}

    async def disturb(self, client: ClusterClient, name: str, fault: str) -> None:
        """Kill an engine, stop it, or freeze it until it is replaced by the others, as a broken network would."""
        old = self.processes[name]
        if fault == "freeze":
            old.process.send_signal(signal.SIGSTOP)
            while name in client.engines:
                await asyncio.sleep(0.05)
            old.process.send_signal(signal.SIGCONT)
            await client.set_engines(self.addresses)
            return
        await asyncio.to_thread(old.kill if fault == "kill" else old.stop)
        self.processes[name] = EngineProcess(self.secret)
        self.addresses[name] = await asyncio.to_thread(self.processes[name].address)
        await client.set_engines(self.addresses)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()


@pytest.fixture
def cluster():
    made = Cluster(2)
    yield made
    made.close()


async def run(cluster: Cluster, faults: list[str]) -> None:
    client = ClusterClient(ClusterKey.of(cluster.secret))
    await client.set_engines(cluster.addresses)
    assert client.engines == sorted(cluster.addresses)
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
                await cluster.disturb(client, chosen.choice(sorted(cluster.processes)), fault)
        finally:
            is_over = True

    *counts, _ = await asyncio.gather(*(ask(number) for number in range(len(expected))), disturb())
    assert all(counts)
    await client.close()


def test_no_token_is_lost_or_doubled_when_engines_fail(cluster):
    asyncio.run(run(cluster, ["kill", "stop", "freeze"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_faults(cluster):
    asyncio.run(run(cluster, ["kill", "kill", "stop", "freeze"] * 25))


def test_without_an_engine_a_request_waits_and_fails(cluster):
    async def ask() -> None:
        client = ClusterClient(ClusterKey.of(cluster.secret), patience_s=0.2)
        with pytest.raises(EngineLost, match="no engine of the cluster"):
            await complete(client, requests()[0])
        await client.set_engines({"e0": cluster.addresses["e0"]})
        task = asyncio.create_task(complete(client, requests()[1]))
        while client._engines["e0"].num_open == 0:
            await asyncio.sleep(0)
        cluster.processes["e0"].kill()
        with pytest.raises(EngineLost):
            await task
        await client.close()

    asyncio.run(ask())


def test_another_key_is_not_served(cluster, monkeypatch):
    monkeypatch.setattr("symbiosis.server.engines.cluster_client._CONNECT_S", 1.0)

    async def ask() -> None:
        client = ClusterClient(ClusterKey.of("a stranger's secret"))
        await client.set_engines(cluster.addresses)
        assert client.engines == []
        await client.close()

    asyncio.run(ask())
