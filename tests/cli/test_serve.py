"""The command line and Python API next to HTTP: `symbiosis adapters …`, `symbiosis chat --adapter NAME`, `symbiosis.Engine`."""

from __future__ import annotations

import json
import re
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli import tables
from symbiosis.cli.commands import adapters, chat
from symbiosis.cli.main import app
from symbiosis.serving.scheduling.sequence import Sampling
from tests.server.conftest import ANN, CHIEF


def run(*arguments: object, stdin: str = "", **environment: str):
    return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin, env={"COLUMNS": "200", **environment})


def fails(*arguments: object, **environment: str) -> str:
    done = run(*arguments, **environment)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_adapters_are_added_listed_pinned_and_removed(keyed_server, world):
    mine, chiefs = (("--connect", keyed_server.url, "--key", key) for key in (ANN, CHIEF))
    added = run("adapters", "add", "pirate", world.root / "pirate", *mine)
    assert added.stdout == f"pirate (of ann) is served: symbiosis chat --adapter pirate --connect {keyed_server.url}\n", (
        added.output
    )
    shown = run("adapters", "list", "--connect", keyed_server.url, SYMBIOSIS_KEY=ANN).stdout
    assert [line.split("│")[1].strip() for line in shown.splitlines() if "│" in line] == ["judge", "pirate"]
    assert " all " in shown
    assert " ann " in shown
    assert "yes" not in shown
    assert run("adapters", "pin", "pirate", "--owner", "ann", *chiefs).stdout == "pirate is pinned\n"
    assert "yes" in run("adapters", "list", *mine).stdout
    assert run("adapters", "pin", "pirate", "--owner", "ann", "--off", *chiefs).exit_code == 0
    assert "yes" not in run("adapters", "list", *mine).stdout
    assert run("adapters", "remove", "pirate", *mine).stdout == "pirate is removed\n"
    assert "pirate" not in run("adapters", "list", *mine).stdout
    assert run("adapters", "add", "both", world.root / "cook", *chiefs).stdout.startswith("both (for all tenants)")
    assert run("adapters", "remove", "both", *chiefs).exit_code == 0


def test_chat_speaks_with_an_adapter_of_the_server(keyed_server, world):
    talk = [{"role": "user", "content": "hi"}]
    first = world.answers("judge", talk, 6)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "and"}]
    second = world.answers("judge", talk, 6)
    options = ("--connect", keyed_server.url, "--key", ANN, "--max-new-tokens", 6, "--temperature", 0)
    done = run("chat", "--adapter", "judge", *options, stdin="hi\n\nand\n/exit\nnever\n")
    assert done.stdout == f"{first}\n{second}\n", done.output
    base = run("chat", *options, stdin="hi\n")
    assert base.stdout == f"{world.answers(None, talk[:1], 6)}\n"


def test_chat_is_over_http_where_it_is_served(keyed_server, world, monkeypatch):
    monkeypatch.setattr(chat, "DEFAULT_URL", keyed_server.url)
    done = run("chat", "--key", ANN, "--max-new-tokens", 6, "--temperature", 0, stdin="hi\n")
    assert done.stdout == f"{world.answers(None, [{'role': 'user', 'content': 'hi'}], 6)}\n", done.output


def test_an_adapter_that_chat_cannot_use_is_reported_before_the_first_line(keyed_server, world):
    at = ("--connect", keyed_server.url, "--key", ANN)
    assert "there is no model 'unknown'" in fails("chat", "--adapter", "unknown", *at)
    assert "symbiosis adapters add NAME" in fails("chat", "--adapter", world.root / "pirate", *at)
    assert "folder of an adapter" in fails("chat", "--adapter", "judge", "--connect", "tcp://127.0.0.1:1")
    assert "--split expects" in fails("chat", "--split", *at)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_narrow_table_of_adapters_cuts_nothing(monkeypatch, capsys, terminal):
    adapter = {"id": f"ft-parrot-{'b' * 24}", "owner": "a-tenant-of-some-length", "parent": "SmolLM2-135M-Instruct"}
    adapter |= {"root": "c" * 64, "bytes": 1_234_567, "pinned": True}
    monkeypatch.setattr(adapters.HttpClient, "adapters", lambda self: [adapter])
    monkeypatch.setattr(tables.Console, "is_terminal", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    adapters.list_adapters("http://127.0.0.1:1", None)
    said = capsys.readouterr().out
    assert adapter["id"] in said
    assert adapter["owner"] in said
    assert "…" not in said
    assert (len(said.splitlines()[0]) <= 80) is terminal
    assert (adapter["parent"] in said) is not terminal


def test_what_goes_wrong_is_one_line_that_helps(keyed_server, world, tmp_path):
    at = ("--connect", keyed_server.url)
    assert "--key or SYMBIOSIS_KEY" in fails("adapters", "list", *at)
    assert "unknown key" in fails("adapters", "list", *at, "--key", "wrong")
    assert "no adapter 'unknown'" in fails("adapters", "remove", "unknown", *at, "--key", ANN)
    assert "adapter_config.json" in fails("adapters", "add", "x", tmp_path, *at, "--key", ANN)
    assert "letters, digits" in fails("adapters", "add", "../evil", world.root / "pirate", *at, "--key", ANN)
    assert "letters, digits" in fails("adapters", "remove", "", *at, "--key", ANN)
    assert "letters, digits" in fails("adapters", "add", "..", world.root / "pirate", *at, "--key", ANN)
    assert "admin key" in fails("adapters", "pin", "judge", *at, "--key", ANN)
    assert "--key, not --token" in fails("chat", *at, "--token", "x")
    assert "--token, not --key" in fails("chat", "--connect", "tcp://127.0.0.1:1", "--key", "x")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 5_000_000)
    assert "bytes" in fails("adapters", "add", "x", tmp_path, *at, "--key", ANN)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        unserved = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "symbiosis serve --http" in fails("adapters", "list", "--connect", unserved)
        assert "symbiosis serve --http" in fails("chat", "--connect", unserved)
    assert "use http://" in fails("adapters", "list", "--connect", keyed_server.url.replace("http:", "https:"))
    unknown = fails("adapters", "list", "--connect", "http://unknown.invalid:8000")
    assert re.search(r"\((Name or service not known|Temporary failure in name resolution)\)", unknown), unknown  # by resolver
    assert "http://HOST:PORT" in fails("adapters", "list", "--connect", "tcp://127.0.0.1:7777")
    assert "set keys" in fails("serve", world.folder, "--http", "--cors-origin", "*")
    assert "https://app.example:8443" in fails("serve", world.folder, "--http", "--cors-origin", "app.example")
    assert "add --http" in fails("serve", world.folder, "--cors-origin", "https://app.example")
    assert "--adapter is empty" in fails("chat", "--adapter", "", *at, "--key", ANN)


def test_an_engine_in_python_answers_each_prompt_with_its_adapter(world):
    engine = symbiosis.Engine(world.folder)
    for name in ("pirate", "poet"):
        engine.add_adapter(name, world.root / name)
    names = ["pirate", None, "poet"]
    made = engine.generate(["the"] * 3, adapters=names, sampling=Sampling(temperature=0.0, max_tokens=12))
    assert [answer.text for answer in made] == [world.says(name, "the", 12) for name in names]


@pytest.mark.parametrize("said", [b"[1, 2]", b"nothing", b"\xff"])
def test_a_server_that_is_none_of_ours_is_detected(said):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        assert "is it a Symbiosis server?" in fails("adapters", "list", "--connect", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()


def test_tenants_own_address_is_not_waited_for(serve):
    """Who listens there greets at once, in no line, and waits for a greeting."""
    assert "does not speak HTTP" in fails("jobs", "list", "--connect", serve("tcp").address.replace("tcp://", "http://"))


def test_top_with_a_tenants_key_says_what_the_tenant_can_do(keyed_server):
    said = fails("top", "--once", "--connect", keyed_server.url, "--key", ANN)
    assert "this key is a tenant's" in said
    assert "Pass it as --key; or see your own row at the executor" in said
    assert run("top", "--once", "--connect", keyed_server.url, "--key", CHIEF).exit_code == 0
