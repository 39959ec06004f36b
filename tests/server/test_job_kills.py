"""kill -9 of the HTTP process or the whole server: every job resumes and ends in the same adapter."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from safetensors.torch import load

from tests.server.job_client import LONG, created, until, uploaded

STEPS = 36
SLOW = {**LONG, "n_steps": STEPS, "checkpoint_every": 4, "learning_rate": 1e-2}


def job_of(client: openai.OpenAI, id: str):
    """Retries while the server restarts."""
    end = time.monotonic() + 120
    while True:
        try:
            return client.fine_tuning.jobs.retrieve(id)
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < end
            time.sleep(0.1)


def finished(client: openai.OpenAI, id: str):
    end = time.monotonic() + 200
    while (job := job_of(client, id)).status in ("queued", "running"):
        assert time.monotonic() < end, job
        time.sleep(0.1)
    assert job.status == "succeeded", job.error
    steps = [event.data["step"] for event in client.fine_tuning.jobs.list_events(id, limit=100) if event.type == "metrics"]
    assert sorted(steps) == list(range(1, STEPS + 1))  # none lost, none repeated
    return job


def weights(url: str, name: str) -> dict[str, torch.Tensor]:
    content = httpx2.get(f"{url}/v1/adapters/{name}/adapter_model.safetensors", timeout=60, verify=False).content
    return load(content)


def check_same(url: str, jobs: list) -> None:
    """Within rounding: other rows of a batch change the last bits."""
    expected, *others = [weights(url, job.fine_tuned_model) for job in jobs]
    for found in others:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def kill(server) -> None:
    slot = server.hosting._door.processes._slots[0]
    slot.process._process.kill()
    slot.process._process.wait()
    slot.deaths = 0  # the test kills it more often than the limit
    server.hosting.check()


@pytest.mark.slow
def test_jobs_end_in_the_same_adapter_after_kills_of_the_http_process(world, start, tmp_path):
    server = start(world.folder, uploads=tmp_path / "up")
    client = server.client()
    file = uploaded(client)
    expected = until(client, created(client, SLOW, training_file=file).id, "succeeded")
    jobs = [created(client, SLOW, training_file=file).id for _ in range(2)]
    random.seed(5)
    for _ in range(2):
        time.sleep(random.uniform(0.1, 1.0))
        kill(server)
        job_of(client, jobs[0])
    check_same(server.url, [expected, *(finished(client, id) for id in jobs)])
    assert len(client.fine_tuning.jobs.list().data) == 3


def served(folder: Path, root: Path) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "symbiosis", "serve", str(folder), "--listen", "shm://", "--http", "127.0.0.1:0"]
    command += ["--uploads", str(root / "up")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    url = next((line.split()[2] for line in process.stdout if line.startswith("listening at http")), None)
    assert url is not None
    return process, url


@pytest.mark.parametrize(
    "kills", [pytest.param(count, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]) for count in (2, 50)]
)
def test_jobs_end_in_the_same_adapter_after_kills_of_the_server(world, tmp_path, kills):
    process, url = served(world.folder, tmp_path)
    job = None
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        file = uploaded(client)
        until(client, created(client, SLOW, training_file=file).id, "succeeded")
        random.seed(kills)
        for _ in range(kills):
            if job is None or job_of(client, job).status == "succeeded":
                job = created(client, SLOW, training_file=file).id
            time.sleep(random.uniform(0.0, 1.5))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process, url = served(world.folder, tmp_path)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        jobs = [each.id for each in client.fine_tuning.jobs.list(limit=100)]
        done = [finished(client, each) for each in jobs]
        check_same(url, done[::-1])
        assert len({each.fine_tuned_model for each in done}) == len(jobs)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait(60)
