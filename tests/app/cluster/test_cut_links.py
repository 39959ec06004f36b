"""A broken network between an HTTP process and one engine, which the director and others still reach."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress
from tests.app.cluster.running_cluster import RunningCluster
from tests.app.cluster.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class ProxiedClient(ClusterClient):
    """Its connections to engines pass through proxies."""

    def __init__(self, director: EngineAddress, key: ClusterKey) -> None:
        super().__init__(director, key)
        self.proxies: dict[str, list[TcpProxy]] = {}
        self.proxied: dict[str, EngineAddress] = {}

    def _add_engines(self, addresses: Mapping[str, EngineAddress]) -> None:
        for name, address in addresses.items():
            if name not in self.proxied:
                urls = address.messages, address.tokens
                made = self.proxies[name] = [TcpProxy("127.0.0.1", int(url.rpartition(":")[2])) for url in urls]
                messages, tokens = (f"tcp://127.0.0.1:{proxy.port}" for proxy in made)
                self.proxied[name] = replace(address, messages=messages, tokens=tokens)
        super()._add_engines({name: self.proxied[name] for name in addresses})

    def cut(self, name: str) -> None:
        for proxy in self.proxies[name]:
            proxy.cut()

    def heal(self, name: str) -> None:
        for proxy in self.proxies[name]:
            proxy.heal()

    async def close(self) -> None:
        await super().close()
        for proxies in self.proxies.values():
            for proxy in proxies:
                proxy.close()


def requests() -> list[GenerateRequest]:
    samplings = [
        Sampling(temperature=0, max_tokens=200, ignore_eos=True),
        Sampling(seed=7, max_tokens=200, ignore_eos=True),
        Sampling(seed=9, max_tokens=200, ignore_eos=True, logprobs=2),
    ]
    return [GenerateRequest(prompt=[3 + number, 5], sampling=samplings[number % 3], n=1 + number % 2) for number in range(6)]


async def generate(client: ClusterClient, request: GenerateRequest) -> list[list[int]]:
    tokens, ends = [[] for _ in range(request.n)], 0
    async with client.submit([request]) as active:
        async for events in active.events():
            for _, event in events:
                if isinstance(event, Token):
                    tokens[event.number].append(event.token)
                else:
                    assert isinstance(event, Finished)
                    assert event.error is None
                    ends += 1
    assert ends == request.n
    return tokens


def test_requests_go_around_an_engine_that_one_process_does_not_reach(tmp_path):
    served = RunningCluster(tmp_path)

    async def run() -> None:
        client = ProxiedClient(served.host.director, ClusterKey.of(served.host.secret))
        await client.start()
        await served.wait_for_engines(client)
        expected = [await generate(client, request) for request in requests()]
        cut = min(client.engines)
        is_over, counts = False, [0] * len(expected)

        async def ask(number: int) -> None:
            while not is_over:
                assert await generate(client, requests()[number]) == expected[number]
                counts[number] += 1

        async def disturb() -> None:
            nonlocal is_over
            try:
                await asyncio.sleep(0.3)
                client.cut(cut)
                while cut in client.engines:
                    await asyncio.sleep(0.05)
                assert set(served.engines()) == set(served.host.launcher.pids)  # the director and the front door have both
                before = list(counts)
                while not all(now >= then + 2 for now, then in zip(counts, before, strict=True)):
                    await asyncio.sleep(0.05)
                client.heal(cut)
                await served.wait_for_engines(client)
                await asyncio.sleep(0.5)
            finally:
                is_over = True

        await asyncio.gather(*(ask(number) for number in range(len(expected))), disturb())
        while (await client.ask("statistics"))["cluster"]["placed"]:  # nothing stays at the director
            await asyncio.sleep(0.1)
        await client.close()

    try:
        asyncio.run(run())
    finally:
        served.close()
