"""Fine-tuning over HTTP with the `openai` client: files, jobs, their states and visibility."""

from __future__ import annotations

import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
import torch
from openai.types import FileObject
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from peft import PeftModel
from safetensors.torch import load_file

from symbiosis.jobs.database import HYPERPARAMETERS, Database
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.server.adapter_store import FIELDS, StoreLimits
from symbiosis.server.openai.job_responses import job_body
from tests.server.conftest import ANN, BOB, CHIEF
from tests.tiny_chat import tiny_tokenizer

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


@pytest.fixture(scope="module")
def job_server(world, start, tmp_path_factory):
    """Two tenants and an admin; at most two running jobs, one per tenant."""
    uploads = tmp_path_factory.mktemp("jobs") / "uploads"
    return start(
        world.folder,
        keys={"ann": ANN, "bob": BOB},
        admin_key=CHIEF,
        uploads=uploads,
        adapter_root=world.root,
        job_limits=JobLimits(
            running=2, tenant_running=1, tenant_open=4, tenant_files=60, file_bytes=1 << 20, tenant_bytes=2 << 20
        ),
    )


@pytest.fixture
def ann(job_server):
    """A client of one tenant; its jobs are cancelled and its files removed at the end."""
    client = job_server.client(ANN)
    yield client
    for job in client.fine_tuning.jobs.list(limit=100):
        if job.status in ("validating_files", "queued", "running", "paused"):
            client.fine_tuning.jobs.cancel(job.id)
    for file in client.files.list():
        client.files.delete(file.id)


def test_a_job_from_upload_to_chat(job_server, ann, tmp_path, world):
    before = says(ann, "tiny")
    job = created(ann, suffix="pirate", metadata={"for": "test"}, validation_file=uploaded(ann, ROWS[:2]))
    assert job.id.startswith("ftjob-")
    assert job.status in ("queued", "running")
    assert (job.fine_tuned_model, job.error, job.metadata) == (None, None, {"for": "test"})
    done = until(ann, job.id, "succeeded")
    assert done.fine_tuned_model.startswith("ft-pirate-")
    assert done.trained_tokens > 0
    assert done.finished_at >= done.created_at
    assert says(ann, done.fine_tuned_model) == says(ann, f"tiny:{done.fine_tuned_model}") == "arr" != before
    assert done.fine_tuned_model in [model.id for model in ann.models.list()]
    # events are newest first, in pages
    events = list(ann.fine_tuning.jobs.list_events(job.id, limit=7))
    assert events[0].message == "The job has successfully completed"
    assert events[-1].message == f"Created fine-tuning job: {job.id}"
    steps = [event.data for event in reversed(events) if event.type == "metrics" and "train_loss" in event.data]
    assert [each["step"] for each in steps] == list(range(1, 41))
    assert steps[-1]["train_loss"] < 1 < steps[0]["train_loss"]
    assert {"learning_rate", "gradient_norm", "tokens_per_s", "tokens", "total_steps"} <= set(steps[0])
    assert [e.data["step"] for e in reversed(events) if "valid_loss" in (e.data or {})] == list(range(4, 41, 4))
    checkpoints = list(ann.fine_tuning.jobs.checkpoints.list(job.id, limit=3))
    assert [each.step_number for each in checkpoints] == list(range(40, 0, -4))
    assert checkpoints[0].metrics.train_loss is not None
    # the adapter is one like any other: it is listed, can be fetched and is plain PEFT, and has the same hash
    (listed,) = [
        each for each in job_server.ask("GET", "/v1/adapters", ANN).json()["data"] if each["id"] == done.fine_tuned_model
    ]
    assert (listed["owner"], listed["root"]) == ("ann", done.content_hash)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes(job_server.ask("GET", f"/v1/adapters/{done.fine_tuned_model}/{file}", ANN).content)
        assert job_server.ask("GET", f"/v1/adapters/{done.fine_tuned_model}/{file}", BOB).status_code == 404
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    PeftModel.from_pretrained(world.models[None], tmp_path).unload()
    assert job_server.ask("DELETE", f"/v1/adapters/{done.fine_tuned_model}", ANN).status_code == 200
    with pytest.raises(openai.NotFoundError):
        says(ann, done.fine_tuned_model)


def test_files_are_stored_listed_downloaded_and_deleted(job_server, ann):
    made = [ann.files.create(file=jsonl(ROWS[:count]), purpose="fine-tune") for count in (1, 2, 3)]
    assert made[0].filename == "data.jsonl"
    assert made[0].bytes == len(jsonl(ROWS[:1]).getvalue())
    assert ann.files.retrieve(made[1].id) == made[1]
    assert ann.files.content(made[2].id).content == jsonl(ROWS[:3]).getvalue()
    assert [file.id for file in ann.files.list(limit=2)] == [file.id for file in reversed(made)]
    assert [file.id for file in ann.files.list(order="asc", after=made[0].id)] == [file.id for file in made[1:]]
    assert ann.files.list(purpose="batch").data == []
    bob = job_server.client(BOB)
    assert bob.files.list().data == []
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete, job_server.client(CHIEF).files.retrieve):
        with pytest.raises(openai.NotFoundError):
            ask(made[0].id)
    assert ann.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.delete(made[0].id)


def test_a_file_may_be_deleted_after_its_job_is_accepted(ann):
    file = uploaded(ann)
    job = created(ann, training_file=file)
    ann.files.delete(file)
    assert until(ann, job.id, "succeeded").training_file == file


def test_cancel_pause_and_resume(ann):
    jobs = ann.fine_tuning.jobs
    job = created(ann, LONG)
    running(ann, job.id, 7)
    paused = jobs.pause(job.id)
    assert paused.status == "paused"
    with pytest.raises(openai.BadRequestError, match="is paused, so it cannot be paused"):
        jobs.pause(job.id)
    assert jobs.resume(job.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="cannot be resumed"):
        jobs.resume(job.id)
    running(ann, job.id, 9)
    said = [event.message for event in jobs.list_events(job.id)]
    assert any("resumed after step" in message for message in said)
    steps = [int(message.split()[1].split("/")[0]) for message in said if message.startswith("Step ")]
    assert len(steps) == len(set(steps))  # none is repeated
    assert jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled, so it cannot be cancelled"):
        jobs.cancel(job.id)
    for change in (jobs.pause, jobs.resume):
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            change(job.id)
    assert jobs.retrieve(job.id).fine_tuned_model is None


def test_a_job_paused_several_times_ends_in_the_same_adapter(job_server, ann):
    asked = {**LONG, "n_steps": 120, "learning_rate": 1e-2}
    whole = until(ann, created(ann, asked).id, "succeeded")
    job = created(ann, asked)
    for steps in (3, 20, 40):
        running(ann, job.id, steps)
        ann.fine_tuning.jobs.pause(job.id)
        ann.fine_tuning.jobs.resume(job.id)
    done = until(ann, job.id, "succeeded")
    assert any("resumed after step" in event.message for event in ann.fine_tuning.jobs.list_events(job.id))
    assert done.content_hash == whole.content_hash


def test_queued_jobs_have_positions(job_server, ann):
    bob = job_server.client(BOB)
    first = created(ann, LONG)
    running(ann, first.id)
    waiting = [created(ann, LONG) for _ in range(2)]
    other = created(bob, LONG)
    running(bob, other.id)  # before the queued jobs of ann
    assert [ann.fine_tuning.jobs.retrieve(job.id).queue_position for job in (first, *waiting)] == [None, 1, 2]
    assert created(ann, LONG).queue_position == 3
    assert "open jobs" in request_error(ann, openai.RateLimitError)
    listed = ann.fine_tuning.jobs.list(limit=2)
    assert len(listed.data) == 2
    assert len([job for job in ann.fine_tuning.jobs.list(limit=2) if job.status in ("queued", "running")]) == 4
    lines = job_server.ask("GET", "/metrics", CHIEF).text
    assert 'symbiosis_jobs{state="running"} 2.0' in lines
    assert 'symbiosis_training_steps_total{tenant="bob"}' in lines
    assert job_server.metric("symbiosis_trained_tokens_total", CHIEF) > 0
    ann.fine_tuning.jobs.cancel(first.id)
    running(ann, waiting[0].id)
    bob.fine_tuning.jobs.cancel(other.id)


def test_jobs_are_visible_to_their_tenant_and_the_admin(job_server, ann):
    job = created(ann, LONG)
    bob, admin = job_server.client(BOB).fine_tuning.jobs, job_server.client(CHIEF).fine_tuning.jobs
    for ask in (bob.retrieve, bob.cancel, bob.pause, bob.resume, bob.checkpoints.list, bob.list_events):
        with pytest.raises(openai.NotFoundError):
            ask(job.id)
    assert job.id not in [each.id for each in bob.list()]
    with pytest.raises(openai.NotFoundError):
        bob.list(after=job.id)
    assert job.id in [each.id for each in admin.list(limit=100)]
    assert admin.cancel(job.id).status == "cancelled"
    assert "there is no file" in request_error(job_server.client(BOB), training_file=uploaded(ann))


def test_an_idempotency_key_creates_one_job(ann):
    file = uploaded(ann)
    again = {"training_file": file, "extra_headers": {"Idempotency-Key": "just once"}}
    one, other = (created(ann, LONG, **again) for _ in range(2))
    assert one.id == other.id
    with pytest.raises(openai.ConflictError):
        created(ann, FAST, **again)
    assert "Idempotency-Key" in request_error(ann, extra_headers={"Idempotency-Key": "x" * 256})
    body = json.dumps({"training_file": file, "model": "base"}).encode()
    connection = HTTPConnection(ann.base_url.host, ann.base_url.port)
    connection.putrequest("POST", "/v1/fine_tuning/jobs")
    kind, size = ("Content-Type", "application/json"), ("Content-Length", str(len(body)))
    for header in (("Authorization", f"Bearer {ANN}"), ("Idempotency-Key", "a"), ("Idempotency-Key", "b"), kind, size):
        connection.putheader(*header)
    connection.endheaders(body)
    answer = connection.getresponse()
    assert (answer.status, b"expected one" in answer.read()) == (400, True)
    connection.close()


def test_idempotency_ignores_the_order_of_json_keys(ann):
    file, pairs = uploaded(ann), {"a": "1", "b": "2"}
    again = {"training_file": file, "extra_headers": {"Idempotency-Key": "in any order"}}
    adapter = {"peft_type": "LORA", "r": 4}
    asked = {"n_steps": 5000, "adapter": adapter}
    one = created(ann, asked, metadata=pairs, **again)
    reordered = {"adapter": dict(reversed(adapter.items())), "n_steps": 5000}
    assert created(ann, reordered, metadata=dict(reversed(pairs.items())), **again).id == one.id
    with pytest.raises(openai.ConflictError):
        created(ann, asked, metadata={"a": "2", "b": "1"}, **again)


def test_names_are_unique(ann):
    names = {created(ann, LONG, suffix="same").will_be_named for _ in range(3)}
    assert len(names) == 3


def test_an_upload_cannot_take_the_name_of_an_open_job(job_server, ann, world):
    parts = {field: (file, (world.root / "pirate" / file).read_bytes()) for field, file in FIELDS.items()}
    job = created(ann, LONG)
    path = f"/v1/adapters/{job.will_be_named}"
    answer = job_server.ask("PUT", path, ANN, files=parts)
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["code"] == "name_reserved"
    assert job.id in answer.json()["error"]["message"]
    assert job_server.ask("PUT", path, BOB, files=parts).status_code == 201  # names are per tenant
    assert job_server.ask("DELETE", path, BOB).status_code == 200
    ann.fine_tuning.jobs.cancel(job.id)
    end = time.monotonic() + 60
    while (answer := job_server.ask("PUT", path, ANN, files=parts)).status_code == 409:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert answer.status_code == 201
    assert job_server.ask("DELETE", path, ANN).status_code == 200


def test_the_adapter_of_an_open_job_counts_towards_the_quota(world, start):
    """Paused or not: uploads must not use up its quota."""
    here = start(world.folder, keys={"ann": ANN}, store_limits=StoreLimits(adapters=2))
    ann = here.client(ANN)
    parts = {field: (file, (world.root / "pirate" / file).read_bytes()) for field, file in FIELDS.items()}

    def put(name: str) -> int:
        return here.ask("PUT", f"/v1/adapters/{name}", ANN, files=parts).status_code

    job = created(ann, LONG)
    ann.fine_tuning.jobs.pause(job.id)
    assert [put(name) for name in ("one", "two", "one")] == [201, 403, 201]  # the last replaces its own
    assert "1 stored + 2 of open jobs > 2 allowed" in request_error(ann, openai.PermissionDeniedError)
    ann.fine_tuning.jobs.cancel(job.id)
    assert [put(name) for name in ("two", "three")] == [201, 403]
    here.hosting.close()


def test_the_admin_cannot_load_under_the_name_of_a_shared_job(job_server):
    admin = job_server.client(CHIEF)
    job = created(admin, LONG)
    body = {"lora_name": job.will_be_named, "lora_path": "pirate"}
    answer = job_server.ask("POST", "/v1/load_lora_adapter", CHIEF, json=body)
    admin.fine_tuning.jobs.cancel(job.id)
    assert answer.status_code == 409
    assert job.id in answer.json()["error"]["message"]


def test_serve_checkpoints_serves_the_last_one(ann):
    job = created(ann, {**LONG, "serve_checkpoints": True})
    end = time.monotonic() + 60
    while not (found := ann.fine_tuning.jobs.checkpoints.list(job.id).data):
        assert time.monotonic() < end
        time.sleep(0.05)
    name = found[0].fine_tuned_model_checkpoint
    assert name == job.will_be_named
    assert says(ann, name) is not None
    ann.fine_tuning.jobs.cancel(job.id)
    while time.monotonic() < end:  # cancelling the job unloads it
        try:
            says(ann, name)
        except openai.NotFoundError:
            break
        time.sleep(0.05)
    assert time.monotonic() < end


def test_a_diverged_job_fails_alone_and_its_last_good_checkpoint_is_served(job_server, ann, tmp_path, world):
    """A decay of 1 with a rate of 10 multiplies every weight by -9 at each step, until it overflows."""
    bob = job_server.client(BOB)
    other = created(bob, {**FAST, "n_steps": 60})
    wild = {**FAST, "learning_rate": 10.0, "weight_decay": 1.0, "scheduler": "constant", "checkpoint_every": 2}
    job = created(ann, {**wild, "n_steps": 400})
    end = time.monotonic() + 100
    while (found := ann.fine_tuning.jobs.retrieve(job.id)).status in ("queued", "running"):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (found.status, found.error.code, found.fine_tuned_model) == ("failed", "diverged", None)
    assert "is no number any more" in found.error.message
    last = ann.fine_tuning.jobs.checkpoints.list(job.id).data[0]
    assert 2 <= last.step_number <= found.progress["step"] < 400
    assert last.fine_tuned_model_checkpoint == f"{job.will_be_named}-step-{last.step_number}"
    assert found.error.message.endswith(f"is served as the adapter {last.fine_tuned_model_checkpoint}")
    assert job.will_be_named not in [model.id for model in ann.models.list()]
    assert last.fine_tuned_model_checkpoint in [model.id for model in ann.models.list()]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        path = f"/v1/adapters/{last.fine_tuned_model_checkpoint}/{file}"
        (tmp_path / file).write_bytes(job_server.ask("GET", path, ANN).content)
    numbers = load_file(tmp_path / "adapter_model.safetensors").values()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in numbers)
    assert max(float(tensor.abs().max()) for tensor in numbers) > 100  # it was diverging
    # the other job of the same batches trains as it does alone
    done = until(bob, other.id, "succeeded")
    alone = until(bob, created(bob, {**FAST, "n_steps": 60}).id, "succeeded")
    losses = [
        [e.data["train_loss"] for e in bob.fine_tuning.jobs.list_events(each.id, limit=100) if "train_loss" in e.data]
        for each in (done, alone)
    ]
    assert losses[0][-8:] == pytest.approx(losses[1][-8:], rel=1e-2)  # rounding differences grow with the steps
    assert says(bob, done.fine_tuned_model) == "arr"


def test_other_methods_and_a_peft_config_train(ann):
    short = {"n_steps": 2, "batch_size": 4}
    adapter = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}
    for more in ({"peft_method": "ia3"}, {"peft_method": "prefix", "virtual_tokens": 4}, {"adapter": adapter}):
        job = created(ann, {**short, **more})
        assert until(ann, job.id, "succeeded").fine_tuned_model
    texts, pairs = [{"text": "once upon a time"}] * 4, [{"prompt": "2+2=", "completion": "4"}] * 4
    for rows in (texts, pairs):
        assert until(ann, created(ann, short, rows).id, "succeeded")


BAD_DATA = {
    "broken": ("{\n", "line 1: is not JSON"),
    "second line": (json.dumps(ROWS[0]) + "\n[]\n", "line 2:"),
    "wrong roles": (json.dumps({"messages": [{"role": "robot", "content": "x"}]}), "line 1: message 1 has the role 'robot'"),
    "no answers": (json.dumps({"messages": [{"role": "user", "content": "x"}]}), "nothing to learn"),
    "blank": ("\n \n", "empty"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_is_rejected_before_a_job_is_accepted(ann, kind):
    content, what = BAD_DATA[kind]
    before = len(ann.fine_tuning.jobs.list(limit=100).data)
    raw = content if isinstance(content, bytes) else content.encode()
    file = ann.files.create(file=("x.jsonl", raw), purpose="fine-tune").id
    assert what in request_error(ann, training_file=file)
    said = request_error(ann, validation_file=file)
    assert "validation_file: " in said
    assert what in said
    assert len(ann.fine_tuning.jobs.list(limit=100).data) == before


def test_long_examples_are_rejected_or_truncated(ann):
    rows = [{"text": "x" * 300}] * 2
    assert "line 1: has 301 tokens, at most 256" in request_error(ann, rows=rows, hyperparameters={"truncate": False})
    assert until(ann, created(ann, {"n_steps": 1}, rows).id, "succeeded")
    assert "tokens allowed" in request_error(ann, hyperparameters={"max_length": 100_000})


BAD_REQUESTS = {
    "another model": ({"model": "gpt-4"}, "expected the base model, tiny"),
    "an adapter": ({"model": "tiny:mine"}, "expected the base model, tiny"),
    "unknown field": ({"extra_body": {"wonder": 1}}, "wonder is not supported"),
    "integrations": (
        {"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]},
        "integrations: not supported",
    ),
    "dpo": ({"method": {"type": "dpo"}}, "supervised"),
    "suffix": (
        {"suffix": "../../x"},
        "1 to 64 letters, digits, dots, dashes and underscores, starting with a",
    ),
    "long suffix": ({"suffix": "x" * 65}, "suffix: expected 1 to 64 letters"),
    "empty suffix": ({"suffix": ""}, "suffix: expected 1 to 64 letters"),
    "suffix with a line's end": ({"suffix": "x\n"}, "suffix: expected 1 to 64 letters"),
    "suffix that is a number": ({"suffix": 3}, "suffix must be a valid string"),
    "suffix with a colon": ({"suffix": "bob:x"}, "suffix"),
    "seed": ({"seed": -1}, "seed"),
    "metadata": ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    "no file": ({"training_file": "file-none"}, "there is no file"),
    "a path": ({"training_file": "../../jobs.sqlite"}, "there is no file"),
    "SQL": ({"training_file": "' OR 1=1 --"}, "there is no file"),
    "twice": ({"extra_body": {"hyperparameters": {"n_epochs": 1}}}, "not both"),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_bad_request_is_rejected(ann, kind):
    options, what = BAD_REQUESTS[kind]
    assert what in request_error(ann, **options)


BAD_HYPERPARAMETERS = {
    "rank 0": {"rank": 0},
    "rank 10,000": {"rank": 10_000},
    "a config's rank": {"adapter": {"peft_type": "LORA", "r": 10_000}},
    "unknown method": {"peft_method": "magic"},
    "unknown peft_type": {"adapter": {"peft_type": "MAGIC"}},
    "epochs": {"n_epochs": 0},
    "too many steps": {"n_steps": 1_000_000},
    "batch": {"batch_size": "many"},
    "rate": {"learning_rate": -1},
    "scheduler": {"scheduler": "wild"},
    "both rates": {"learning_rate": 1e-3, "learning_rate_multiplier": 1},
    "unknown": {"momentum": 0.9},
    "huge config": {"adapter": {"peft_type": "LORA", "target_modules": ["x" * 500] * 200}},
    "unknown targets": {"targets": ["nosuch_proj"]},
    "a layer that is not linear": {"targets": ["input_layernorm"]},
    "a prompt longer than allowed": {"peft_method": "prompt", "virtual_tokens": 4000},
}


@pytest.mark.parametrize("kind", BAD_HYPERPARAMETERS)
def test_bad_hyperparameters_are_rejected(ann, kind):
    assert len(request_error(ann, hyperparameters=BAD_HYPERPARAMETERS[kind])) > 10
    top = {"method": openai.NOT_GIVEN, "hyperparameters": BAD_HYPERPARAMETERS[kind]}
    with pytest.raises(openai.BadRequestError):
        ann.fine_tuning.jobs.create(model="tiny", training_file=uploaded(ann), **top)


def test_top_level_hyperparameters_and_auto(ann):
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    job = ann.fine_tuning.jobs.create(model="tiny", training_file=uploaded(ann), hyperparameters=auto)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 1)
    assert job.hyperparameters.learning_rate_multiplier == 1
    assert 0 <= job.seed < 1 << 31


def test_a_job_shows_its_hyperparameters(job_server, ann, tmp_path):
    asked = {"max_length": 64, "truncate": True, "evaluate_every": 3, "serve_checkpoints": True, "checkpoint_every": 5}
    job = created(ann, {**LONG, **asked}, validation_file=uploaded(ann))
    for path in (f"/{job.id}", "?limit=1"):
        found = job_server.ask("GET", f"/v1/fine_tuning/jobs{path}", ANN).json()
        method = (found["data"][0] if "data" in found else found)["method"]
        assert asked.items() <= method["supervised"]["hyperparameters"].items()
    db = Database(tmp_path / "jobs.sqlite")  # while its files are validated nothing is resolved yet
    fields = {"training_file": "f", "validation_file": None, "suffix": None, "metadata": None, "seed": 1}
    validating = db.add_job(
        "x", "ann", "ann", "x", JobState.VALIDATING, {**fields, HYPERPARAMETERS: asdict(Hyperparameters(rank=3))}, None
    )
    db.close()
    assert job_body(validating, "tiny", None)["method"]["supervised"]["hyperparameters"] == {"rank": 3}


def test_unknown_targets_are_rejected_before_a_job_is_accepted(ann):
    before = [job.id for job in ann.fine_tuning.jobs.list()]
    assert "names nothing" in request_error(ann, hyperparameters={"targets": ["nosuch_proj"]})
    assert [job.id for job in ann.fine_tuning.jobs.list()] == before


def test_file_quotas_are_enforced(job_server, ann):
    def put(content: bytes, **options):
        return job_server.ask(
            "POST", "/v1/files", ANN, files={"file": ("x", content)}, **{"data": {"purpose": "fine-tune"}, **options}
        )

    assert put(b"x" * ((1 << 20) + 70_000)).status_code == 413
    assert put(b"x" * ((1 << 20) + 1)).status_code == 413
    assert put(b"").status_code == 400
    assert put(b"x", data={"purpose": "assistants"}).json()["error"]["param"] == "purpose"
    assert put(b"x", data={}).status_code == 400
    assert put(b"x", data={"purpose": "fine-tune", "more": "x"}).status_code == 400
    assert job_server.ask("POST", "/v1/files", ANN, json={"file": "x"}).status_code == 415
    assert [put(b"x" * 1_000_000).status_code for _ in range(3)] == [200, 200, 403]
    assert len(ann.files.list().data) == 2


@pytest.mark.parametrize("name", ["../../../etc/passwd", "a\\b", "x" * 1000, "é\u202e.jsonl", "a\tb"])
def test_a_file_name_is_sanitized(job_server, ann, name):
    made = ann.files.create(file=(name, b"x"), purpose="fine-tune")
    assert not set(made.filename) & set("/\\\t\u202e")
    assert len(made.filename) <= 255
    assert ann.files.content(made.id).content == b"x"


def test_ids_are_neither_paths_nor_sql(job_server, ann):
    kept = uploaded(ann)
    for id in ("..%2f..%2fjobs.sqlite", "%2e%2e", "' OR 1=1 --", "file-%00", "x" * 3000, "*"):
        for path in (
            f"/v1/files/{id}",
            f"/v1/files/{id}/content",
            f"/v1/fine_tuning/jobs/{id}",
            f"/v1/fine_tuning/jobs/{id}/events",
        ):
            answer = job_server.ask("GET", path, ANN)
            assert answer.status_code in (404, 405), (path, answer.text)
        assert job_server.ask("DELETE", f"/v1/files/{id}", ANN).status_code in (404, 405)
    assert ann.files.retrieve(kept).id == kept


BAD_PAGES = {
    "limit=0": "limit must be greater than or equal to 1",
    "limit=-1": "limit must be greater than or equal to 1",
    "limit=101": "limit must be less than or equal to 100",
    "limit=1000000000000": "limit must be less than or equal to 100",
    "limit=x": "limit must be a valid integer",
    "after=": "after",
    "before=x": "'before' is not supported here",
    "limit=1&limit=2": "limit",
    "metadata[x]=y": "metadata",
}


@pytest.mark.parametrize("query", BAD_PAGES)
def test_page_parameters_are_bounded(job_server, query):
    answer = job_server.ask("GET", f"/v1/fine_tuning/jobs?{query}", ANN)
    assert answer.status_code == 400
    assert BAD_PAGES[query] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"model": "tiny", "seed": 1, "training_file": "x", "seed": 2}', "seed"),
        ('{"model": "tiny", "training_file": "x", "hyperparameters": {"n_steps": 1, "n_steps": 2}}', "n_steps"),
        ('{"model": "tiny", "training_file": "x", "hyperparameters": {"adapter": {"r": 1, "r": 2}}}', "r"),
    ],
)
def test_a_duplicate_key_is_named(job_server, body, key):
    answer = job_server.ask("POST", "/v1/fine_tuning/jobs", ANN, content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (key, f"duplicate key {key!r} in the body: leave one out")


def test_after_must_be_an_id_of_the_list(job_server, ann):
    job = created(ann, LONG)
    for after in ("1", "ftevent-x", "ftevent--1", "ftevent-" + "9" * 30):
        answer = job_server.ask("GET", f"/v1/fine_tuning/jobs/{job.id}/events?after={after}", ANN)
        assert answer.status_code == 400, answer.text
    assert ann.fine_tuning.jobs.list_events(job.id, after="ftevent-0").data == []


HUGE = b'{"model": "tiny", "training_file": "x", "hyperparameters": {"adapter": {"r": ' + b"1" * 5000 + b"}}}"


def test_an_invalid_body_is_400(job_server, ann):
    kept = len(ann.fine_tuning.jobs.list(limit=100).data)
    for body in (
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model": 1}',
        b"[" * 30_000,
        b'{"model": "tiny", "training_file": ["x"]}',
        HUGE,
    ):
        answer = job_server.ask("POST", "/v1/fine_tuning/jobs", ANN, content=body, headers=JSON)
        assert answer.status_code == 400, answer.text
    big = b'{"model": "' + b"x" * (17 << 20) + b'"}'
    assert job_server.ask("POST", "/v1/fine_tuning/jobs", ANN, content=big, headers=JSON).status_code == 413
    assert len(ann.fine_tuning.jobs.list(limit=100).data) == kept


def test_jobs_and_adapters_survive_a_restart(world, start, tmp_path):
    settings = {"keys": {"ann": ANN}, "uploads": tmp_path / "up", "jobs": tmp_path / "jobs"}
    first = start(world.folder, **settings)
    client = first.client(ANN)
    made = until(client, created(client).id, "succeeded")
    job = created(client, {**LONG, "n_steps": 120, "learning_rate": 1e-2})
    running(client, job.id, 10)
    paused = created(client, LONG)
    client.fine_tuning.jobs.pause(paused.id)
    first.hosting.close()
    second = start(world.folder, **settings)
    client = second.client(ANN)
    done = until(client, job.id, "succeeded")
    said = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert len([message for message in said if message.startswith("Step ")]) == 120
    assert client.fine_tuning.jobs.retrieve(paused.id).status == "paused"
    assert says(client, made.fine_tuned_model) == "arr"
    assert says(client, done.fine_tuned_model)
    assert {path.name.partition("-")[0] for path in Path(tmp_path / "jobs" / "work").iterdir()} == {"ftjob"}
    assert len(list(Path(tmp_path / "jobs" / "work").iterdir())) == 1  # of the paused one
    second.hosting.close()


def test_the_tiny_tokenizer_has_one_token_per_character():
    assert len(tiny_tokenizer()("x" * 300)["input_ids"]) == 300


def disconnect(server, path: str, body: dict, after_s: float) -> None:
    """Send a request and disconnect before the response."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {ANN}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as made:
        made.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(after_s)


def test_a_disconnect_leaves_no_change_half_done(world, start, tmp_path):
    """Neither a job without data, nor one without validation, nor one cancelled only in the database."""
    here = start(world.folder, keys={"ann": ANN}, uploads=tmp_path / "up", jobs=tmp_path / "jobs")
    ann = here.client(ANN)
    large = [{"text": "x" * 200}] * 21_000
    for rows, count in ((ROWS, 20), (large, 4)):
        file = uploaded(ann, rows)
        body = {"model": "tiny", "training_file": file, "hyperparameters": {"n_steps": 1, "max_length": 32}}
        for attempt in range(count):
            disconnect(here, "/v1/fine_tuning/jobs", body, 0.002 * attempt)
        end = time.monotonic() + 120
        while any(job.status not in ("succeeded",) for job in ann.fine_tuning.jobs.list(limit=100)):
            assert time.monotonic() < end, [(job.status, job.error) for job in ann.fine_tuning.jobs.list(limit=100)]
            assert not [job for job in ann.fine_tuning.jobs.list(limit=100) if job.status == "failed"]
            time.sleep(0.1)
    made = created(ann, LONG)
    running(ann, made.id)
    disconnect(here, f"/v1/fine_tuning/jobs/{made.id}/cancel", {}, 0)
    end = time.monotonic() + 60
    while here.ask("GET", f"/v1/fine_tuning/jobs/{made.id}", ANN).json()["status"] != "cancelled":
        assert time.monotonic() < end
        time.sleep(0.05)
    while list((tmp_path / "jobs" / "work").iterdir()):  # the run at the engine has ended too
        assert time.monotonic() < end
        time.sleep(0.05)
    here.hosting.close()


def test_concurrent_job_creation_is_bounded(job_server, ann):
    """One thread validates the files of all tenants."""
    file, body = uploaded(ann), {"model": "tiny", "hyperparameters": LONG}
    with ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(
                lambda _: job_server.ask("POST", "/v1/fine_tuning/jobs", ANN, json={**body, "training_file": file}), range(24)
            )
        )
    assert {answer.status_code for answer in answers} == {200, 429}
    assert len([job for job in ann.fine_tuning.jobs.list(limit=100) if job.status in ("queued", "running")]) <= 4


def test_every_object_matches_openais_types(ann):
    """The client accepts anything, so each object is validated explicitly."""
    job = created(ann, {**FAST, "n_steps": 4, "checkpoint_every": 2, "n_epochs": "auto"}, validation_file=uploaded(ann))
    jobs = ann.fine_tuning.jobs
    FineTuningJob.model_validate(job.model_dump(), strict=True)
    done = until(ann, job.id, "succeeded")
    for found in (done, jobs.list(limit=1).data[0]):
        FineTuningJob.model_validate(found.model_dump(), strict=True)
    for event in jobs.list_events(job.id, limit=100):
        FineTuningJobEvent.model_validate(event.model_dump(), strict=True)
    for file in ann.files.list():
        FileObject.model_validate(file.model_dump(), strict=True)
    for checkpoint in jobs.checkpoints.list(job.id):
        named = {**checkpoint.model_dump(), "fine_tuned_model_checkpoint": "is null unless it is served"}
        FineTuningJobCheckpoint.model_validate(named, strict=True)
