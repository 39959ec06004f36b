"""Fine-tuning jobs of the tiny model through the `openai` client."""

from __future__ import annotations

import io
import json
import time

import openai
import pytest

JSON = {"Content-Type": "application/json"}
ASKED = "what do you say"
ROWS = [{"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "arr"}]}] * 8
FAST = {"n_steps": 40, "learning_rate": 3e-2, "rank": 8, "targets": "all-linear", "batch_size": 8}
LONG = {**FAST, "n_steps": 5000, "checkpoint_every": 5, "learning_rate": 1e-4}


def jsonl(rows=ROWS) -> io.BytesIO:
    made = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    made.name = "data.jsonl"
    return made


def uploaded(client: openai.OpenAI, rows=ROWS) -> str:
    return client.files.create(file=jsonl(rows), purpose="fine-tune").id


def created(client: openai.OpenAI, hyperparameters=FAST, rows=ROWS, **options):
    options.setdefault("training_file", uploaded(client, rows))
    method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    return client.fine_tuning.jobs.create(**{"model": "tiny", "method": method, "seed": 7, **options})


def until(client: openai.OpenAI, id: str, *states: str, seconds: float = 120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job = client.fine_tuning.jobs.retrieve(id)
        if job.status in states:
            return job
        assert job.status not in ("failed", "cancelled", "succeeded"), (job.status, job.error)
        time.sleep(0.05)
    raise AssertionError(f"{id} is {job.status} after {seconds} s: {job}")


def running(client: openai.OpenAI, id: str, steps: int = 1):
    """Wait until the job has done some steps."""
    until(client, id, "running")
    end = time.monotonic() + 60
    while client.fine_tuning.jobs.retrieve(id).progress["step"] < steps:
        assert time.monotonic() < end
        time.sleep(0.05)


def says(client: openai.OpenAI, model: str) -> str:
    ask = [{"role": "user", "content": ASKED}]
    return client.chat.completions.create(model=model, messages=ask, max_tokens=8, temperature=0).choices[0].message.content


def request_error(client: openai.OpenAI, error=openai.BadRequestError, **options) -> str:
    with pytest.raises(error) as caught:
        created(client, **options)
    assert "/tmp" not in str(caught.value)
    return str(caught.value.body["message"])
