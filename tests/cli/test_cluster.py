"""`symbiosis cluster …`: a cluster of processes on this machine, and the errors of every command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner

from symbiosis.app.cluster.secret_file import read_or_create_secret
from symbiosis.cli.main import app
from tests.tiny_chat import make_tiny_chat

_ENGINE = ("--no-training", "--threads", "1")
_PATIENCE_S = 90.0


def run(*arguments: object):
    return CliRunner().invoke(app, ["cluster", *map(str, arguments)], env={"COLUMNS": "200"})


def fails(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def start(log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", "from symbiosis.cli.main import app; app()", "cluster", *map(str, arguments)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "200"},
        )


def until(is_so: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


class Up:
    """`symbiosis cluster up` of one engine, as a process."""

    def __init__(self, folder: Path) -> None:
        self.state, self.model, log = folder / "state", make_tiny_chat(folder / "model"), folder / "up.log"
        store = folder / "store"
        store.mkdir()
        where = ("--state", self.state, "--http", "127.0.0.1:0", "--port", 0, "--store", store)
        self.process = start(log, "up", self.model, "--launcher", "processes", *where, *_ENGINE)
        until(lambda: "listening at" in log.read_text(), self.process, log)
        self.output = log.read_text()
        self.url = re.findall(r"^listening at (\S+)$", self.output, re.M)[0]
        self.director = re.findall(r"^director at (\S+)$", self.output, re.M)[0]

    def status(self) -> dict:
        return json.loads(run("status", "--state", self.state, "--json").stdout)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"))
    try:
        yield up
    finally:
        up.process.terminate()
        up.process.wait(60)


def test_up_serves_and_status_shows_it(up):
    body = {"model": "model", "prompt": "hi", "max_tokens": 4}
    request = Request(f"{up.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    assert json.loads(urlopen(request, timeout=60).read())["choices"]
    secret = up.state / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in up.output
    assert "Other hosts cannot join: add --host IP" in up.output
    status = up.status()
    ((name, engine),) = status["engines"].items()
    assert engine["status"] == "ready"
    assert status["cluster"]["wanted"] == 1
    shown = run("status", "--connect", up.url).stdout
    assert name in shown
    assert "engines ready: 1, wanted: 1" in shown


def test_a_second_cluster_needs_a_folder_of_its_own(up):
    line = fails("up", up.model, "--state", up.state, "--http", "127.0.0.1:0", "--launcher", "processes")
    assert "in use by another server" in line


def test_join_needs_the_address_and_the_secret(up, tmp_path):
    read_or_create_secret(tmp_path / "secret")
    assert "there is no secret file" in fails("join", up.director, "--secret-file", tmp_path / "none")
    assert "does not reply to this secret" in fails("join", up.director, "--secret-file", tmp_path / "secret")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    assert f"no director at {nowhere} (Connection refused)" in fails("join", nowhere, "--state", up.state)
    assert "expected HOST:PORT" in fails("join", "nowhere", "--state", up.state)


@pytest.mark.slow
def test_engines_of_another_process_join_and_leave(up, tmp_path):
    log, ready = tmp_path / "join.log", tmp_path / "ready"
    ready.touch()  # of a process that was killed
    joining = start(log, "join", up.director, "--state", up.state, "--model", up.model, "--ready-file", ready, *_ENGINE)
    until(lambda: not ready.exists(), joining, log)
    until(ready.exists, joining, log)
    until(lambda: "has joined" in log.read_text(), joining, log)
    until(lambda: len(up.status()["engines"]) == 2, joining, log)
    time.sleep(12)  # the director looks at their number ten seconds after its start
    assert up.status()["cluster"]["wanted"] == 2
    assert {engine["status"] for engine in up.status()["engines"].values()} == {"ready"}
    joining.terminate()
    assert joining.wait(60) == 0
    assert not ready.exists()
    until(lambda: len(up.status()["engines"]) == 1, up.process, log)
    until(lambda: up.status()["cluster"]["wanted"] == 1, up.process, log)


@pytest.mark.slow
def test_an_engine_with_another_model_is_not_taken(up, tmp_path):
    model, log = make_tiny_chat(tmp_path / "other"), tmp_path / "join.log"
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    joining = start(log, "join", up.director, "--state", up.state, "--model", model, *_ENGINE)
    assert joining.wait(_PATIENCE_S) == 1
    assert "start it with the same model, revision and dtype" in log.read_text()
    assert re.search(r"^error: the cluster does not take the engine \S+: see the log above$", log.read_text(), re.M)


@pytest.mark.slow
def test_drain_replaces_engines_one_at_a_time(up):
    before = set(up.status()["engines"])
    assert "expected one of " + ", ".join(sorted(before)) in fails("drain", "engine-none", "--state", up.state)
    done = run("drain", "--all", "--state", up.state)
    (name,) = before
    assert re.fullmatch(rf"{name} has left and is replaced, after \d+\.\d s\n", done.stdout), done.output
    assert len(up.status()["engines"]) == 1
    assert not before & set(up.status()["engines"])


def test_drain_needs_engines_and_a_cluster(tmp_path):
    assert "name the engines to drain, or add --all" in fails("drain", "--state", tmp_path)
    assert "name the engines to drain, or add --all" in fails("drain", "engine-1", "--all", "--state", tmp_path)
    assert "no cluster runs in" in fails("drain", "--all", "--state", tmp_path)


def test_down_ends_the_cluster(up):  # the last test with `up`
    done = run("down", "--state", up.state)
    assert done.stdout == f"the cluster has ended (process {up.process.pid})\n", done.output
    assert up.process.wait(10) == 0
    assert "no cluster runs in" in fails("down", "--state", up.state)
    assert "no server at" in fails("status", "--connect", up.url)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--launcher", "kubernetes"), "--launcher kubernetes: expected ray or processes"),
        (("--engines", 4, "--max-engines", 2), "--max-engines 2 is less than --engines 4"),
        (("--launcher", "processes", "--ray-port", 6379), "apply to Ray: add --launcher ray"),
        (("--state", "/proc/none"), "/proc/none cannot store a cluster: "),
        (("--profile", "/proc/none"), "/proc/none"),
        (("--http", "nowhere"), "nowhere"),
        (("--store", "s3://key:secret@bucket/x"), "credentials come from the environment"),
        (("--store", "ftp://host/x"), "expected a folder, or one of s3://"),
        (("--store", "/proc/none"), "--store /proc/none: the store's folder is not there: expected one that exists"),
        (("--store", "/proc/version"), "--store /proc/version: the store's folder is not there"),
    ],
)
def test_wrong_options_of_up_are_one_line(tmp_path, arguments, says):
    folder = make_tiny_chat(tmp_path / "model")
    where = ("--state", tmp_path / "state", "--http", "127.0.0.1:0", "--launcher", "processes")
    assert says in fails("up", folder, *where, *arguments)


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    assert "there is no folder" in fails("up", tmp_path / "none", "--state", tmp_path / "state", "--http", "127.0.0.1:0")
    assert not (tmp_path / "state").exists()


def test_command_lines_of_the_page_are_those_of_the_command():
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
    lines = [line.partition(" #")[0] for line in page.splitlines() if line.startswith("symbiosis cluster ")]
    assert any("--store" in line for line in lines)
    for line in lines:
        command, arguments = get_command(app), line.split()[1:]
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(command.name, arguments)


@pytest.mark.parametrize(
    ("command", "says"),
    [("up", "--max-engines"), ("join", "--ray"), ("status", "--json"), ("drain", "--all"), ("down", "--state")],
)
def test_help_has_examples(command, says):
    shown = run(command, "--help").stdout
    assert says in shown
    assert f"symbiosis cluster {command}" in shown
    assert "Example" in shown
