"""`symbiosis finetune --hosted` and `symbiosis jobs …` against a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from symbiosis.cli import tables
from symbiosis.cli.commands import jobs
from symbiosis.cli.http_client import HttpClient
from tests.cli.test_serve import fails, run
from tests.server.conftest import ANN, BOB
from tests.server.job_client import ROWS, says


@pytest.fixture(scope="module")
def studio(world, start):
    return start(world.folder, keys={"ann": ANN, "bob": BOB})


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "data.jsonl"


def test_a_job_from_the_command_line_to_a_chat_with_it(studio, data, tmp_path):
    at = ("--connect", studio.url, "--key", ANN)
    learn = ("--steps", 40, "--lr", 3e-2, "--targets", "all-linear", "--batch-size", 8, "--seed", 7)
    plot, out = tmp_path / "loss.png", tmp_path / "out"
    more = ("--validation", data, "--suffix", "parrot", "--plot", plot, "--out", out)
    done = run("finetune", data, "--hosted", "--url", studio.url, "--key", ANN, *learn, *more)
    assert done.exit_code == 0, done.output
    assert re.search(r"the job is ftjob-\w+\n", done.stderr)
    assert re.search(r"succeeded  40/40  loss \d", done.stderr)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (out / "adapter_config.json").is_file()
    name = re.search(r"(ft-parrot-\w+) is served", done.stdout)[1]
    assert not studio.client(ANN).files.list(purpose="fine-tune").data, "what it uploaded is gone"
    assert says(studio.client(ANN), name) == "arr"
    listed = run("jobs", "list", *at).stdout
    id = re.search(r"ftjob-\w+", listed)[0]
    assert "succeeded" in listed
    assert "40/40" in listed
    assert name in listed
    shown = run("jobs", "show", id, *at).stdout
    assert all(each in shown for each in (id, name, "n steps", "train loss", "learning rate", "max length", "truncate"))
    told = run("jobs", "events", id, *at).stdout.splitlines()
    assert told[-1].endswith("The job has successfully completed")
    assert len(run("jobs", "events", id, "--limit", 3, *at).stdout.splitlines()) == 3
    assert run("jobs", "watch", id, *at).exit_code == 0
    assert run("jobs", "plot", id, tmp_path / "again.png", *at).exit_code == 0
    for change in ("cancel", "pause", "resume"):
        assert "is succeeded" in fails("jobs", change, id, *at)
    assert "no fine-tuning job" in fails("jobs", "show", id, "--connect", studio.url, "--key", BOB)
    assert "none yet" in run("jobs", "list", "--connect", studio.url, "--key", BOB).stdout


def test_a_job_whose_adapter_went_with_the_server_is_reported(world, start, data, tmp_path):
    """Jobs were kept, adapters were not."""
    first = start(world.folder, jobs=tmp_path / "jobs")
    done = run("finetune", data, "--hosted", "--steps", 1, "--connect", first.url)
    id = re.search(r"the job is (ftjob-\w+)\n", done.stderr)[1]
    assert "is served" in done.stdout
    assert "no longer served" not in run("jobs", "show", id, "--connect", first.url).stdout
    assert "gone" not in run("jobs", "list", "--connect", first.url).stdout
    first.hosting.close()
    second = start(world.folder, jobs=tmp_path / "jobs")
    for command in ("show", "watch"):
        said = run("jobs", command, id, "--connect", second.url)
        assert said.exit_code == 0, said.output
        assert "no longer served: it was deleted, or the server was restarted" in said.stdout
        assert "is served" not in said.stdout
    assert re.search(r"ft-\S+ \(gone\)", run("jobs", "list", "--connect", second.url).stdout)
    second.hosting.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_narrow_table_of_jobs_leaves_out_columns_and_shortens_nothing(monkeypatch, capsys, terminal):
    progress = {"step": 123, "total_steps": 1000, "train_loss": 1.5, "tokens_per_s": 1234.5}
    job = {"id": f"ftjob-{'a' * 24}", "organization_id": "ann", "status": "succeeded", "progress": progress}
    job |= {"queue_position": None, "estimated_finish": None, "fine_tuned_model": f"ft-parrot-{'b' * 8}"}
    monkeypatch.setattr(jobs.HttpClient, "jobs", lambda self, limit: [job])
    monkeypatch.setattr(jobs.HttpClient, "adapters", lambda self: [{"id": job["fine_tuned_model"]}])
    monkeypatch.setattr(tables.Console, "is_terminal", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    jobs.list_jobs("http://127.0.0.1:1", None, 20)
    said = capsys.readouterr().out
    assert all(each in said for each in (job["id"], "succeeded", job["fine_tuned_model"]))
    assert ("1,23" in said) is not terminal
    assert (len(said.splitlines()[0]) <= 80) is terminal


def test_a_loss_that_rose_is_reported(studio, data, monkeypatch):
    at = ("--connect", studio.url, "--key", ANN)
    rising = [{"data": {"train_loss": loss}} for loss in (3.0, 5.0, 9.0, 9.0)]
    monkeypatch.setattr(jobs.HttpClient, "events", lambda self, id: rising)
    done = run("finetune", data, "--hosted", "--steps", 4, *at)
    assert done.exit_code == 0, done.output
    assert re.search(r"warning: the loss rose from [\d.]+ to [\d.]+: .*lower --lr", done.stderr), done.stderr
    id = re.search(r"the job is (ftjob-\w+)", done.stderr)[1]
    assert "the loss rose from" in run("jobs", "show", id, *at).stdout


def test_a_fraction_of_an_epoch(studio, data):
    at = ("--connect", studio.url, "--key", ANN)
    done = run("finetune", data, "--hosted", "--epochs", 0.5, "--batch-size", 2, *at)
    assert "succeeded  2/2" in done.stderr, done.output
    assert "must be greater than 0" in run("finetune", data, "--hosted", "--epochs", 0, *at).stderr


def test_ctrl_c_leaves_the_job_running_and_prints_how_to_follow_it(studio, data):
    at = ["--connect", studio.url]
    command = [sys.executable, "-m", "symbiosis", "finetune", str(data), "--hosted", "--steps", "5000", *at]
    environment = {**os.environ, "SYMBIOSIS_KEY": ANN, "COLUMNS": "200"}
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in the background ignores it otherwise
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment, preexec_fn=heeds)  # noqa: PLW1509 - no threads are forked
    client = studio.client(ANN)
    until = time.monotonic() + 60
    while not (running := [job for job in client.fine_tuning.jobs.list() if job.status == "running"]):
        assert time.monotonic() < until
        time.sleep(0.1)
    (job,) = running
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert f"symbiosis jobs watch {job.id} --connect {studio.url}" in said
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    mine = (*at, "--key", ANN)
    assert run("jobs", "pause", job.id, *mine).stdout == f"{job.id} is paused\n"
    assert "is queued" in run("jobs", "resume", job.id, *mine).stdout
    assert run("jobs", "cancel", job.id, *mine).stdout == f"{job.id} is cancelled\n"
    assert "is cancelled" in fails("jobs", "cancel", job.id, *mine)


def test_a_paused_job_is_followed_and_the_resume_command_is_printed_once_per_pause(monkeypatch):
    states = iter(["running", "paused", "paused", "queued", "running", "paused", "running", "cancelled"])
    progress = {"step": 3, "total_steps": 10}
    job = {"progress": progress, "queue_position": None, "estimated_finish": None, "fine_tuned_model": None, "error": None}
    monkeypatch.setattr(jobs.HttpClient, "job", lambda self, id: {**job, "id": id, "status": next(states)})
    monkeypatch.setattr(jobs, "_POLL_S", 0)
    done = run("jobs", "watch", "ftjob-1", "--connect", "http://127.0.0.1:1")
    assert done.stderr.count("`symbiosis jobs resume ftjob-1 --connect http://127.0.0.1:1` resumes it") == 2
    assert done.stderr.splitlines()[-1] == "error: the job ftjob-1 is cancelled"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_data_is_checked_names_the_job(studio, data, monkeypatch, times):
    """Once: the job is fetched by its key. Twice: the command to list jobs is printed."""
    create, made = HttpClient.create_job, []

    def interrupted(self, body, key):
        made.append(create(self, body, key)["id"])
        if len(made) <= times:
            raise KeyboardInterrupt
        return {"id": made[-1]}

    monkeypatch.setattr(jobs.HttpClient, "create_job", interrupted)
    done = run("finetune", data, "--hosted", "--steps", 5000, "--connect", studio.url, "--key", ANN)
    assert done.exit_code == 130, done.output
    (id,) = set(made)
    if times == 1:
        assert f"Follow it with `symbiosis jobs watch {id} " in done.stderr
        assert f"symbiosis jobs cancel {id} --connect {studio.url}" in done.stderr
    else:
        assert f"symbiosis jobs list --connect {studio.url}" in done.stderr
    assert not studio.client(ANN).files.list(purpose="fine-tune").data, "what it uploaded is gone"
    assert run("jobs", "cancel", id, "--connect", studio.url, "--key", ANN).exit_code == 0


def test_what_goes_wrong_is_one_line_that_helps(studio, data, tmp_path):
    at = ("--connect", studio.url, "--key", ANN)
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\nnonsense\n')
    assert "line 2: is not JSON" in run("finetune", tmp_path / "bad.jsonl", "--hosted", *at).stderr
    assert "there is no file" in run("finetune", tmp_path / "none.jsonl", "--hosted", *at).stderr
    assert "magic" in run("finetune", data, "--hosted", "--method", "magic", *at).stderr
    assert "--key or SYMBIOSIS_KEY" in fails("jobs", "list", "--connect", studio.url)
    assert "add --hosted" in fails("finetune", data, "--plot", tmp_path / "x.png", "--out", tmp_path / "x")
    assert "--out FOLDER" in fails("finetune", data)
    assert not studio.client(ANN).files.list(purpose="fine-tune").data
    before = len(HttpClient(studio.url, ANN).jobs())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "adapter_config.json").write_text("mine")
    for command in (("finetune", data, "--hosted"), ("jobs", "watch", "ftjob-x")):
        said = run(*command, "--out", tmp_path / "full", "--connect", "http://127.0.0.1:1").stderr  # no server
        assert "full is not empty: choose another folder with --out" in said
    assert "choose another folder with --out" in run("finetune", data, "--hosted", "--out", data, *at).stderr
    assert "there is no folder" in run("finetune", data, "--hosted", "--plot", tmp_path / "no" / "x.png", *at).stderr
    for id in ("", "ftjob-x/events"):
        for command in (("show", id), ("watch", id), ("events", id), ("plot", id, tmp_path / "x.png"), ("cancel", id)):
            assert f"{id!r} is not a job id: expected one that `symbiosis jobs list` shows" in fails("jobs", *command, *at)
    assert "--token applies to" in run("finetune", data, "--hosted", "--token", "x", *at).stderr
    for plot in ("x.xyz", "x", "."):
        assert "such as loss.png" in run("finetune", data, "--hosted", "--plot", tmp_path / plot, *at).stderr
    assert len(HttpClient(studio.url, ANN).jobs()) == before, "nothing was trained"
