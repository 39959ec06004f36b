"""Several HTTP workers: one owner for limits, metrics, adapters and jobs, and a death of one process is its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from symbiosis.server.rate_limits import RequestLimits
from tests.server.conftest import ANN, BOB, CHAT, CHIEF
from tests.server.test_lifecycle import until

STREAM = {"model": "tiny", "prompt": "x", "max_tokens": 240, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def many(start, world):
    """With two workers."""
    return start(
        world.folder,
        workers=2,
        keys={"ann": ANN, "bob": BOB},
        admin_key=CHIEF,
        requests=RequestLimits(at_once=12, per_minute=60),
        adapters={"pirate": world.root / "pirate"},
    )


@pytest.fixture(scope="module")
def open_to_all(start, world):
    return start(world.folder, workers=2)


def test_completions_are_those_of_one_process(open_to_all, world):
    with ThreadPoolExecutor(8) as pool:
        ask = lambda _: open_to_all.client().chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, temperature=0)  # noqa: E731
        texts = {answer.choices[0].message.content for answer in pool.map(ask, range(24))}
    assert texts == {world.answers(None, CHAT, 8)}


def test_streams_of_all_workers_lose_and_repeat_nothing(open_to_all):
    def stream(_):
        chunks = open_to_all.client().completions.create(**{**STREAM, "max_tokens": 60}, temperature=0)
        return "".join(chunk.choices[0].text for chunk in chunks)

    whole = open_to_all.client().completions.create(**{**STREAM, "max_tokens": 60, "stream": False}, temperature=0)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(stream, range(48))) == {whole.choices[0].text}


def test_the_rate_limit_is_exact_over_all_workers(many):
    """Connections of their own reach all workers."""

    def ask(_) -> int:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        return many.ask("POST", "/v1/completions", BOB, json=body).status_code

    with ThreadPoolExecutor(6) as pool:
        codes = list(pool.map(ask, range(90)))
    assert codes.count(200) in (60, 61, 62, 63)  # the bucket refills by one a second
    assert codes.count(429) == 90 - codes.count(200)


def test_concurrent_requests_are_limited_over_all_workers(many):
    async def run() -> list[object]:
        clients = [many.async_client(ANN) for _ in range(20)]
        asks = [
            client.completions.create(model="tiny", prompt="x", max_tokens=240, extra_body={"ignore_eos": True})
            for client in clients
        ]
        found = await asyncio.gather(*asks, return_exceptions=True)
        for client in clients:
            await client.close()
        return found

    found = asyncio.run(run())
    assert sum(isinstance(each, openai.RateLimitError) for each in found) == 20 - 12


def test_metrics_are_sums_over_all_workers(open_to_all):
    before = open_to_all.metric("symbiosis_tokens_total")
    for _ in range(12):
        open_to_all.client().completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2, extra_body={"ignore_eos": True})
    assert open_to_all.metric("symbiosis_tokens_total") == before + 60


def test_routes_with_a_state_answer_through_any_worker(many, world, tmp_path):
    lines = [json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})] * 12
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines))
    for _ in range(6):
        client = many.client(ANN)
        file = client.files.create(file=data.open("rb"), purpose="fine-tune")
        assert client.files.content(file.id).read() == data.read_bytes()
        assert client.files.delete(file.id).deleted
        assert "pirate" in {model.id for model in client.models.list()}
    assert many.ask("GET", "/v1/nothing", ANN).status_code == 404
    assert many.ask("PUT", "/v1/models", ANN).status_code == 405
    assert many.ask("GET", "/metrics", ANN).status_code == 403
    assert many.ask("GET", "/v1/files").status_code == 401


def test_a_dead_worker_ends_its_own_connections_only(open_to_all):
    server = open_to_all

    async def stream(client) -> int | None:
        """Chunks of a whole stream; None if it broke."""
        count = 0
        try:
            async for _ in await client.completions.create(**STREAM):
                count += 1
                await asyncio.sleep(0)
        except (openai.APIError, httpx2.HTTPError):
            return None
        return count

    async def run() -> list[int | None]:
        clients = [server.async_client() for _ in range(12)]
        tasks = [asyncio.create_task(stream(client)) for client in clients]
        await asyncio.to_thread(until, lambda: server.metric("symbiosis_requests_running") == 12)
        os.kill(server.hosting._door.processes.pids[1], signal.SIGKILL)
        found = await asyncio.gather(*tasks)
        for client in clients:
            await client.close()
        return found

    found = asyncio.run(run())
    assert 0 < found.count(None) < 12
    server.hosting.check()
    until(lambda: server.metric("symbiosis_requests_running") + server.metric("symbiosis_requests_waiting") == 0)
    for _ in range(8):
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_a_dead_control_process_is_replaced_and_streams_go_on(open_to_all):
    server = open_to_all
    with server.client().completions.create(**STREAM) as stream:
        chunks = iter(stream)
        next(chunks)
        os.kill(server.hosting._door.processes.pids[0], signal.SIGKILL)
        until(lambda: not server.hosting._door.processes.are_alive())
        server.hosting.check()
        assert sum(1 for _ in chunks) > 100
    until(lambda: server.ask("GET", "/v1/models").status_code == 200, 60)
