"""A cluster in real processes: whatever dies, each completion has exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
from transformers import AutoModelForCausalLM

from symbiosis.app.cluster.director_process import DirectorProcess
from symbiosis.errors import EngineLost, UnknownAdapter
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.engine_ipc import ClusterKey
from tests.app.cluster.running_cluster import ADMIN, KEYS, RunningCluster
from tests.lora import ALL_LINEAR, with_random_lora

pytestmark = pytest.mark.timeout(900)
TOKENS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = RunningCluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


# The client of an HTTP process


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


async def generate(client: ClusterClient, request: GenerateRequest) -> tuple[list[list[int]], list[str]]:
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


async def run(served: RunningCluster, faults: list[str]) -> None:
    client = served.link()
    await client.start()
    await served.wait_for_engines(client)
    expected = await asyncio.gather(*(generate(client, request) for request in requests()))
    assert all(ends == ["length"] * len(tokens) and {len(each) for each in tokens} == {TOKENS} for tokens, ends in expected)
    chosen = random.Random(1)
    is_over = False

    async def ask(number: int) -> int:
        count = 0
        while not is_over or not count:
            index = (number + count) % len(expected)
            assert await generate(client, requests()[index]) == expected[index]
            count += 1
        return count

    async def disturb() -> None:
        nonlocal is_over
        try:
            for fault in faults:
                await asyncio.sleep(chosen.uniform(0.05, 0.4))
                await served.disturb(client, chosen.choice(client.engines), fault)
        finally:
            is_over = True

    *counts, _ = await asyncio.gather(*(ask(number) for number in range(len(expected))), disturb())
    assert all(counts)
    while (stats := (await client.ask("statistics"))["cluster"])["placed"]:  # nothing stays at the director
        assert not stats["waiting"]
        await asyncio.sleep(0.1)
    await client.close()


def test_no_token_is_lost_or_doubled_when_engines_or_the_director_fail(served):
    asyncio.run(run(served, ["director", "kill", "stop", "freeze", "director"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_faults(served):
    asyncio.run(run(served, ["kill", "director", "stop", "freeze"] * 25))


def test_requests_that_cannot_be_placed_say_why(served):
    async def ask() -> None:
        client = served.link()
        await client.start()
        await served.wait_for_engines(client)
        with pytest.raises(UnknownAdapter, match="no adapter 'missing'"):
            await generate(client, GenerateRequest(prompt=[3], adapter="missing", tenant="ann"))
        assert (await client.ask("statistics"))["cluster"]["placed"] == 0
        await client.close()

    asyncio.run(ask())


def test_a_request_that_ends_while_it_waits_for_an_engine_leaves_the_director(tmp_path):
    secret = "a secret of this test"
    config = {"host": "127.0.0.1", "port": 0, "secret": secret, "state": str(tmp_path), "engines": 1}
    director = DirectorProcess(config)

    async def ask() -> None:
        client = ClusterClient(director.address, ClusterKey.of(secret), patience_s=0.3)
        await client.start()
        with pytest.raises(EngineLost, match="no engine of the cluster"):
            await generate(client, requests()[0])
        await asyncio.sleep(0.2)
        stats = (await client.ask("statistics"))["cluster"]
        assert {name: stats[name] for name in ("waiting", "migrations", "placed")} == dict.fromkeys(
            ("waiting", "migrations", "placed"), 0
        )
        await client.close()

    asyncio.run(ask())
    director.close()


def test_requests_wait_for_a_busy_engine_longer_than_for_a_missing_one(tmp_path):
    busy = RunningCluster(tmp_path, 1, max_running=1)
    patience_s, sampling = 0.1, Sampling(temperature=0, max_tokens=200, ignore_eos=True)

    async def ask() -> None:
        client = busy.link(patience_s=patience_s)
        await client.start()
        await busy.wait_for_engines(client)
        started = time.monotonic()
        prompts = [GenerateRequest(prompt=[3 + number], sampling=sampling) for number in range(8)]
        outcomes = await asyncio.gather(*(generate(client, request) for request in prompts))
        assert all(ends == ["length"] for _, ends in outcomes)
        assert time.monotonic() - started > patience_s
        await client.close()

    try:
        asyncio.run(ask())
    finally:
        busy.close()


def test_another_key_is_not_served(served):
    async def ask() -> None:
        client = served.link("a stranger's secret", patience_s=1.0)
        with pytest.raises(EngineLost, match="the director of the cluster cannot be reached"):
            await client.start()
        await client.close()

    asyncio.run(ask())


# Over HTTP


def save_lora(model: Path, folder: Path, *, seed: int) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    with_random_lora(base, tuple(ALL_LINEAR), seed=seed).save_pretrained(folder)


def upload(served: RunningCluster, key: str, folder: Path, name: str) -> None:
    names = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
    files = {field: (folder / file).read_bytes() for field, file in names.items()}
    reply = served.ask("PUT", f"/v1/adapters/{name}", key, files=files)
    assert reply.status_code in (200, 201), reply.text


def complete(client: openai.OpenAI, model: str, prompt: str, **more) -> str:
    more = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}, **more}
    done = client.completions.create(model=model, prompt=prompt, **more)
    return "|".join(choice.text for choice in done.choices)


def test_an_uploaded_adapter_is_served_by_the_cluster(served, tmp_path):
    save_lora(served.model, tmp_path / "one", seed=1)
    save_lora(served.model, tmp_path / "two", seed=2)
    ann, bob = served.client(KEYS["ann"]), served.client(KEYS["bob"])
    base = complete(ann, "tiny", "Hello")
    upload(served, KEYS["ann"], tmp_path / "one", "mine")
    first = complete(ann, "mine", "Hello")
    assert first != base
    found = set()

    def ask() -> None:
        found.add(complete(ann, "mine", "Hello"))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first}
    assert sum(engine["adapters"] for engine in served.engines().values()) >= 1
    upload(served, KEYS["ann"], tmp_path / "two", "mine")
    second = {complete(ann, "mine", "Hello") for _ in range(6)}
    assert len(second) == 1
    assert second != {first}
    with pytest.raises(openai.NotFoundError):
        complete(bob, "mine", "Hello")
    assert "mine" in [model.id for model in ann.models.list()]
    assert served.ask("DELETE", "/v1/adapters/mine", KEYS["ann"]).status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(ann, "mine", "Hello")


def test_a_prompt_goes_to_the_engine_that_has_its_prefix(served):
    ann, bob = served.client(KEYS["ann"]), served.client(KEYS["bob"])
    prompts = [f"{number} " + "the same long prompt " * 8 for number in range(6)]
    before = {name: engine["steps"] for name, engine in served.engines().items()}

    def cached(client: openai.OpenAI, prompt: str, tokens: int) -> int:
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return done.usage.prompt_tokens_details.cached_tokens

    threads = [threading.Thread(target=cached, args=(ann, prompt, 40)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.5)  # statistics of engines are a second old
    after = {name: engine["steps"] for name, engine in served.engines().items()}
    assert all(after[name] > before[name] for name in before)  # both engines have some of the prompts
    again = [cached(ann, prompt, 1) for prompt in prompts]
    assert min(again) >= 128
    others = [cached(bob, prompt, 1) for prompt in prompts]
    assert others == [0] * len(prompts)


def kill_engine(served: RunningCluster) -> None:
    os.kill(min(served.host.launcher.pids.values()), signal.SIGKILL)


def kill_director(served: RunningCluster) -> None:
    os.kill(served.host.director_pid, signal.SIGKILL)


def freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def freeze_engine_until_it_is_lost(served: RunningCluster) -> None:
    pid = min(served.host.launcher.pids.values())
    os.kill(pid, signal.SIGSTOP)
    try:
        served.until(lambda: len(served.engines()) == 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pid in served.host.launcher.pids.values()  # it is taken back, not replaced


def freeze_engine_for_a_moment(served: RunningCluster) -> None:
    freeze(max(served.host.launcher.pids.values()), 1.0)


def freeze_director(served: RunningCluster) -> None:
    freeze(served.host.director_pid, 6.0)


def freeze_director_while_an_engine_dies(served: RunningCluster) -> None:
    pid = served.host.director_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2.0)
        kill_engine(served)
        time.sleep(4.0)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((kill_engine, kill_director, kill_engine), id="kills"),
        pytest.param((freeze_engine_until_it_is_lost, freeze_engine_for_a_moment), id="frozen-engines", marks=pytest.mark.slow),
        pytest.param((freeze_director, freeze_director_while_an_engine_dies), id="frozen-director", marks=pytest.mark.slow),
    ],
)
def test_streams_survive_faults_of_engines_and_of_the_director(served, tmp_path, faults):
    save_lora(served.model, tmp_path / "one", seed=3)
    upload(served, KEYS["ann"], tmp_path / "one", "lasting")
    ann = served.client(KEYS["ann"])
    cases = [("tiny", 1, None), ("lasting", 1, None), ("tiny", 4, 11), ("lasting", 4, 12)]

    def stream(model: str, n: int, seed: int | None) -> list[str]:
        texts = [""] * n
        chosen = {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}
        for chunk in ann.completions.create(
            model=model, prompt="Once", max_tokens=200, n=n, stream=True, extra_body={"ignore_eos": True}, **chosen
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    expected = [stream(*case) for case in cases]
    is_over, failures, counts = threading.Event(), [], [0] * len(cases)

    def ask(number: int) -> None:
        try:
            while not is_over.is_set():
                assert stream(*cases[number]) == expected[number]
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    try:
        for disturb in faults:
            time.sleep(0.5)
            disturb(served)
            time.sleep(1.0)
            served.until(lambda: len(served.engines()) == 2)
            before = sum(counts)
            served.until(lambda: sum(counts) - before >= 2 * len(cases) or failures)  # noqa: B023
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert all(counts)
    served.until(lambda: served.figures()["placed"] == 0)  # nothing stays at the director


def test_a_drained_engine_is_replaced_without_an_error(served):
    ann = served.client(KEYS["ann"])
    expected = complete(ann, "tiny", "Drain")
    before = set(served.engines())
    served.host.ask("drain", engine=min(before))
    while min(before) in served.engines():
        assert complete(ann, "tiny", "Drain") == expected
    served.until(lambda: len(served.engines()) == 2)
    assert complete(ann, "tiny", "Drain") == expected


@pytest.mark.slow
def test_an_engine_that_stays_frozen_is_killed_and_replaced(served):
    pid = min(served.host.launcher.pids.values())
    os.kill(pid, signal.SIGSTOP)
    served.until(lambda: pid not in served.host.launcher.pids.values())  # after a minute
    served.until(lambda: len(served.engines()) == served.count)
    served.until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_killed_worker_is_replaced(served):
    ann = served.client(KEYS["ann"])
    os.kill(served.host.http_pids[1], signal.SIGKILL)
    served.until(served.host._door.processes.are_alive)
    deadline, answers = time.monotonic() + 60, 0
    while answers < 5:
        assert time.monotonic() < deadline
        try:
            complete(ann, "tiny", "x")
            answers += 1
        except openai.APIConnectionError:
            time.sleep(0.2)


def test_limits_hold_over_all_workers(served):
    ann, refused = served.client(KEYS["ann"]), []

    def ask() -> None:
        try:
            ann.completions.create(model="tiny", prompt="x", max_tokens=200, extra_body={"ignore_eos": True})
        except openai.RateLimitError as error:
            refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    metrics = served.ask("GET", "/metrics", ADMIN)
    assert metrics.status_code == 200
    for name in served.engines():
        assert f'symbiosis_cluster_engine_up{{engine="{name}",node="127.0.0.1",status="ready"}} 1.0' in metrics.text


def test_it_is_live_and_not_ready_without_engines(served):
    def status(path: str) -> int:
        return served.ask("GET", path, "none").status_code

    served.until(lambda: status("/ready") == 200)
    failed = served.metric("symbiosis_cluster_engines_lost")
    for pid in served.host.launcher.pids.values():
        os.kill(pid, signal.SIGKILL)
    served.until(lambda: status("/ready") == 503)
    assert status("/live") == 200
    served.until(lambda: status("/ready") == 200 and len(served.engines()) == served.count)
    assert served.metric("symbiosis_cluster_engines_lost") == failed + served.count


def test_top_shows_the_engines(served):
    command = [sys.executable, "-m", "symbiosis", "top", "--once", "--connect", served.host.url, "--key", ADMIN]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}).stdout
    assert all(name in shown for name in served.engines())
    assert "0 requests wait for an engine" in shown


def test_a_job_trains_and_its_adapter_is_served(served):
    bob = served.client(KEYS["bob"])
    lines = [json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo" * 8}]})] * 12
    data = bob.files.create(file=("chats.jsonl", "\n".join(lines).encode()), purpose="fine-tune")
    job = bob.fine_tuning.jobs.create(
        model="tiny", training_file=data.id, suffix="tuned", hyperparameters={"n_epochs": 2, "batch_size": 4}
    )
    served.until(lambda: bob.fine_tuning.jobs.retrieve(job.id).status in ("succeeded", "failed"))
    done = bob.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model is not None
    answers = {complete(bob, done.fine_tuned_model, "hi") for _ in range(8)}
    assert len(answers) == 1
