"""Requests of files and fine-tuning jobs: formats, quotas and errors."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types import FileObject
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from tests.server.conftest import ANN, BOB, CHIEF
from tests.server.job_client import FAST, JSON, LONG, ROWS, created, jsonl, request_error, until, uploaded
from tests.tiny_chat import tiny_tokenizer


def test_files_are_stored_listed_downloaded_and_deleted(job_server, ann):
    made = [ann.files.create(file=jsonl(ROWS[:count]), purpose="fine-tune") for count in (1, 2, 3)]
    assert made[0].filename == "data.jsonl"
    assert made[0].bytes == len(jsonl(ROWS[:1]).getvalue())
    assert ann.files.retrieve(made[1].id) == made[1]
    assert ann.files.content(made[2].id).content == jsonl(ROWS[:3]).getvalue()
    ids = [file.id for file in made]  # other tests upload files to this server too
    assert [file.id for file in ann.files.list(limit=2) if file.id in ids] == ids[::-1]
    assert [file.id for file in ann.files.list(order="asc", after=ids[0]) if file.id in ids] == ids[1:]
    assert ann.files.list(purpose="batch").data == []
    bob = job_server.client(BOB)
    assert not {file.id for file in bob.files.list()} & {*ids}
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete, job_server.client(CHIEF).files.retrieve):
        with pytest.raises(openai.NotFoundError):
            ask(made[0].id)
    assert ann.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.delete(made[0].id)


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


def test_epochs_are_whole_in_responses(ann):
    for epochs, shown in ((1.5, 2), (0.25, 1), (2, 2)):
        job = created(ann, {"n_epochs": epochs})
        for found in (job.hyperparameters.n_epochs, job.method.supervised.hyperparameters.n_epochs):
            assert (found, type(found)) == (shown, int)
        assert ann.fine_tuning.jobs.cancel(job.id).hyperparameters.n_epochs == shown


def test_unknown_targets_are_rejected_before_a_job_is_accepted(ann):
    before = [job.id for job in ann.fine_tuning.jobs.list()]
    assert "names no module" in request_error(ann, hyperparameters={"targets": ["nosuch_proj"]})
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


def test_the_tiny_tokenizer_has_one_token_per_character():
    assert len(tiny_tokenizer()("x" * 300)["input_ids"]) == 300


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
