"""Fine-tuning over HTTP with the `openai` client: the states of jobs and their visibility."""

from __future__ import annotations

import csv
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
from peft import PeftModel
from safetensors.torch import load_file

from symbiosis.jobs.database import HYPERPARAMETERS, Database
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.states import JobState
from symbiosis.server.adapter_store import FIELDS, StoreLimits
from symbiosis.server.openai.job_responses import job_body
from tests.server.conftest import ANN, BOB, CHIEF
from tests.server.job_client import FAST, LONG, ROWS, created, request_error, running, says, until, uploaded


def test_a_job_from_upload_to_chat(job_server, ann, tmp_path, world):
    before = says(ann, "tiny")
    job = created(ann, suffix="pirate", metadata={"for": "test"}, validation_file=uploaded(ann, ROWS[:2]))
    assert job.id.startswith("ftjob-")
    assert job.status in ("queued", "running")
    assert (job.fine_tuned_model, job.error, job.metadata) == (None, None, {"for": "test"})
    assert job.result_files == []
    assert (job.hyperparameters.n_epochs, type(job.hyperparameters.n_epochs)) == (40, int)
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
    # the metrics are a file, as those of OpenAI
    (result,) = done.result_files
    rows = list(csv.DictReader(io.StringIO(ann.files.content(result).text)))
    assert [(int(row["step"]), float(row["train_loss"])) for row in rows] == [(s["step"], s["train_loss"]) for s in steps]
    assert [int(row["step"]) for row in rows if row["valid_loss"]] == list(range(4, 41, 4))
    found = ann.files.retrieve(result)
    assert (found.purpose, found.filename) == ("fine-tune-results", "step_metrics.csv")
    assert [file.id for file in ann.files.list(purpose="fine-tune-results")] == [result]
    assert result in [file.id for file in ann.files.list()]
    assert result not in [file.id for file in ann.files.list(purpose="fine-tune")]
    assert ann.fine_tuning.jobs.list(limit=1).data[0].result_files == [result]
    with pytest.raises(openai.NotFoundError):
        job_server.client(BOB).files.content(result)
    ann.files.delete(result)
    assert ann.fine_tuning.jobs.retrieve(job.id).result_files == []
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
    assert "is not finite" in found.error.message
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
