"""The policies of a cluster in real processes: shares of tenants, owners of prefixes, jobs next to serving, memory pressure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextlib import contextmanager

import openai
import pytest

from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from tests.app.cluster.running_cluster import ADMIN, KEYS, RunningCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MAX_RUNNING = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = RunningCluster(tmp_path_factory.mktemp("cluster"), max_running=MAX_RUNNING)
    yield made
    made.close()


def complete(client: openai.OpenAI, prompt: str, tokens: int) -> openai.types.Completion:
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )


@contextmanager
def load(served: RunningCluster, tenants: dict[str, int], tokens: int = 100):
    """So many requests of each tenant at a time; counts those that have finished."""
    is_over, counts, failures = threading.Event(), Counter(), []

    def ask(tenant: str) -> None:
        client = served.client(KEYS[tenant])
        try:
            while not is_over.is_set():
                complete(client, f"{tenant} asks", tokens)
                counts[tenant] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(tenant,)) for tenant, most in tenants.items() for _ in range(most)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_flood_leaves_another_tenant_its_share(served):
    with load(served, {"ann": 32, "bob": 8}) as counts:
        served.until(lambda: counts["ann"] + counts["bob"] >= 20)
        before = counts.copy()
        served.until(lambda: counts["bob"] - before["bob"] >= 40)
        after = counts - before
    assert after["bob"] / after.total() > 0.35  # first come, first served: 0.2


# Jobs


def start_job(served: RunningCluster, epochs: int):
    bob = served.client(KEYS["bob"])
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo" * 8}]}
    data = bob.files.create(file=("chats.jsonl", "\n".join([json.dumps(chat)] * 12).encode()), purpose="fine-tune")
    params = {"n_epochs": epochs, "batch_size": 4}
    return bob.fine_tuning.jobs.create(model="tiny", training_file=data.id, suffix="tuned", hyperparameters=params)


def messages_of(served: RunningCluster, id: str) -> list[str]:
    bob = served.client(KEYS["bob"])
    return [event.message for event in bob.fine_tuning.jobs.list_events(id, limit=100)]


def wait_for_job(served: RunningCluster, id: str) -> None:
    bob = served.client(KEYS["bob"])
    served.until(lambda: bob.fine_tuning.jobs.retrieve(id).status in ("succeeded", "failed"))
    done = bob.fine_tuning.jobs.retrieve(id)
    assert done.status == "succeeded", done.error


def test_a_job_waits_while_all_engines_are_busy(served):
    with load(served, {"ann": 32}) as counts:
        served.until(lambda: counts["ann"] >= 8)
        job = start_job(served, epochs=1)
        served.until(lambda: served.figures()["jobs_waiting"] == 1)
        assert all(engine["jobs"] == 0 for engine in served.engines().values())
    wait_for_job(served, job.id)
    served.until(lambda: served.figures()["jobs_waiting"] == 0)


def test_a_job_leaves_a_draining_engine_and_goes_on_elsewhere(served):
    moved = served.figures()["jobs_moved"]
    job = start_job(served, epochs=300)
    served.until(lambda: any(message.startswith("Step 20/") for message in messages_of(served, job.id)))
    before = next(name for name, engine in served.engines().items() if engine["jobs"])
    served.host.ask("drain", engine=before)
    served.until(lambda: served.figures()["jobs_moved"] > moved)
    served.until(lambda: any("resumed after step" in message for message in messages_of(served, job.id)))
    assert before not in {name for name, engine in served.engines().items() if engine["jobs"]}
    wait_for_job(served, job.id)
    served.until(lambda: len(served.engines()) == served.count)


# KV cache


async def generate(client: ClusterClient, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async with client.submit([request]) as active:
        async for events in active.events():
            for _, event in events:
                if isinstance(event, Token):
                    tokens.append(event.token)
                else:
                    assert isinstance(event, Finished)
                    assert event.error is None
    return tokens


def test_requests_leave_an_engine_without_kv_cache(tmp_path):
    blocks, block_bytes = 64, 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, their size, tokens, bytes
    served = RunningCluster(tmp_path, cache_gb=blocks * block_bytes / 1e9)

    async def run() -> None:
        client = served.link()
        await client.start()
        await served.wait_for_engines(client)
        assert {engine["blocks"] for engine in served.engines().values()} == {blocks}
        long = [request(number, 245) for number in range(5)]
        expected = [await generate(client, each) for each in long]
        moved = served.figures()["migrations"]
        # They are placed in turns: one engine has all the long ones, the other is soon empty.
        mixed = [each for number in range(5) for each in (long[number], request(50 + number, 60))]
        for _ in range(10):  # what is preempted may go on by itself before it has moved
            found = await asyncio.gather(*(generate(client, each) for each in mixed))
            assert found[::2] == expected
            if served.figures()["migrations"] > moved:
                break
        else:
            pytest.fail("no request has moved")
        await asyncio.sleep(1.5)  # statistics of engines are a second old
        assert statistics(served)["preemptions"] > 0
        await client.close()

    def request(number: int, tokens: int) -> GenerateRequest:
        sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        return GenerateRequest(prompt=[3 + number, 5, 7], sampling=sampling)

    try:
        asyncio.run(run())
    finally:
        served.close()


def statistics(served: RunningCluster) -> dict:
    return served.ask("GET", "/v1/statistics", ADMIN).json()["serving"]


# Engines that one HTTP process does not reach


def test_an_engine_that_a_process_cannot_reach_is_chosen_last(served):
    async def ask() -> None:
        client = served.link()
        await client.start()
        await served.wait_for_engines(client)
        for name in client.engines:
            body = {"tenant": "ann", "adapter": None, "prompt": 3, "generated": 0, "moved": 0, "blocks": []}
            reply = await client.ask("place", **body, unreachable=[name])
            assert reply["engine"] != name
        reply = await client.ask("place", **body, unreachable=client.engines)
        assert reply["engine"] in client.engines
        await client.close()

    asyncio.run(ask())
