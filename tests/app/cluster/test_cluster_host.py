"""A whole cluster over HTTP: a front door, a director and two engines in real processes, and ordinary clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import openai
import pytest
from transformers import AutoModelForCausalLM

from symbiosis.app.cluster.cluster_host import ClusterHost
from symbiosis.server.rate_limits import RequestLimits
from tests.app.cluster.running_cluster import START_S, engine_config
from tests.lora import ALL_LINEAR, with_random_lora
from tests.tiny_chat import make_tiny_chat

pytestmark = pytest.mark.timeout(900)
KEYS = {"ann": "ann-secret", "bob": "bob-secret"}
ADMIN = "admin-secret"


class Served:
    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_chat(folder / "tiny")
        self.host = ClusterHost(
            "127.0.0.1:0",
            engine=engine_config(self.model),
            engines=2,
            state=folder / "state",
            keys=KEYS,
            admin_key=ADMIN,
            workers=2,
            requests=RequestLimits(at_once=40),
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._check)
        self._thread.start()
        self.until(lambda: len(self.engines()) == 2)

    def _check(self) -> None:
        while not self._closing.wait(0.1):
            self.host.check()

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.host.url}/v1", api_key=key, max_retries=0, timeout=120)

    def ask(self, method: str, path: str, key: str, **more) -> httpx2.Response:
        return httpx2.request(method, self.host.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, **more)

    def engines(self) -> dict:
        return self.ask("GET", "/v1/statistics", ADMIN).json()["engines"]

    def until(self, condition) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.host.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


def save_lora(model: Path, folder: Path, *, seed: int) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    with_random_lora(base, tuple(ALL_LINEAR), seed=seed).save_pretrained(folder)


def upload(served: Served, key: str, folder: Path, name: str) -> None:
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


def test_streams_survive_the_death_of_engines_and_of_the_director(served, tmp_path):
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
        for victim in ("engine", "director", "engine"):
            time.sleep(0.5)
            pids = list(served.host.launcher.pids.values())
            os.kill(pids[0] if victim == "engine" else served.host.director_pid, signal.SIGKILL)
            time.sleep(1.0)
            served.until(lambda: len(served.engines()) == 2)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert all(counts)


def test_a_drained_engine_is_replaced_without_an_error(served):
    ann = served.client(KEYS["ann"])
    expected = complete(ann, "tiny", "Drain")
    before = set(served.engines())
    served.host.ask("drain", engine=min(before))
    while min(before) in served.engines():
        assert complete(ann, "tiny", "Drain") == expected
    served.until(lambda: len(served.engines()) == 2)
    assert complete(ann, "tiny", "Drain") == expected


def test_a_killed_worker_ends_its_own_connections_only(served):
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
    assert all(
        f'symbiosis_cluster_engine_up{{engine="{name}",status="ready"}} 1.0' in metrics.text for name in served.engines()
    )


def test_top_shows_the_engines(served):
    command = [sys.executable, "-m", "symbiosis", "top", "--once", "--connect", served.host.url, "--key", ADMIN]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}).stdout
    assert all(name in shown for name in served.engines())
    assert "0 requests wait for an engine" in shown


def test_a_job_trains_on_one_engine_and_is_served_by_all(served):
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
