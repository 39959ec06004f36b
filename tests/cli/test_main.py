"""The `symbiosis` command, as real processes; what a user does wrong ends in one line that helps."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner, Result

from symbiosis.cli.chat import ChatSampling
from symbiosis.cli.commands import chat
from symbiosis.cli.commands.serve_inputs import read_tokens
from symbiosis.cli.local_chat import LocalChat
from symbiosis.cli.local_finetune import METHODS
from symbiosis.cli.main import app
from symbiosis.errors import SymbiosisError
from symbiosis.models import device_names
from tests.tiny_chat import make_tiny_chat, tiny_tokenizer

SECRET = "a-secret-of-ann"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "symbiosis", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}


def run(*arguments: object, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, env=environment(**changes), timeout=120
    )


def run_here(*arguments: object, stdin: str = "") -> Result:
    """The command in this process, where torch is imported already: saves seconds."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env={"COLUMNS": "200"})


def fails(*arguments: object) -> str:
    """Expect an error of one line."""
    result = run_here(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


@contextmanager
def serving(*arguments: object, stop: signal.Signals = signal.SIGTERM, **changes: str):
    """`symbiosis serve` until the block ends; gives the addresses, and all it printed until then."""
    process = subprocess.Popen(
        command("serve", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**changes)
    )
    wanted = sum(argument == "--listen" for argument in arguments)
    printed, addresses = "", []
    try:
        while len(addresses) < wanted:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
            addresses += re.findall(r"^listening at (\S+)$", line, re.MULTILINE)
        yield addresses, printed
    finally:
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert SECRET not in printed + errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_chat(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(folder):
    """An open executor at TCP and shared memory."""
    with serving(folder, "--listen", "tcp://127.0.0.1:0", "--listen", f"shm://cli-{os.getpid()}") as (addresses, _):
        yield addresses


@pytest.fixture(scope="module")
def guarded(folder):
    """An executor that asks for tokens; ended by Ctrl-C rather than SIGTERM."""
    tokens = {"SYMBIOSIS_TOKENS": f"ann={SECRET}, only-a-secret, provider=a-secret-of-the-provider"}
    with serving(folder, "--listen", "tcp://127.0.0.1:0", stop=signal.SIGINT, **tokens) as (addresses, printed):
        assert 'token="…"' in printed
        yield addresses[0]


# -- what works -----------------------------------------------------------------------------


def test_help_imports_no_torch_and_every_command_shows_an_example():
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, symbiosis.cli.main; print([m for m in ('torch', 'transformers') if m in sys.modules])",
        ],
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.strip() == "[]"
    for name in ("serve", "chat", "generate", "finetune", "top", "demo"):
        shown = run_here(name, "--help").output
        assert f"Example: symbiosis {name}" in shown


@pytest.mark.parametrize("link", [0, 1], ids=["tcp", "shm"])
def test_top_imports_no_torch(server, link):
    script = (
        "import sys; from symbiosis.cli.main import app; app(sys.argv[1:], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, "top", "--once", "--connect", server[link]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr
    assert "mean batch" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--device", "cuda"), "no driver is installed"),
        (("serve", "--http", "127.0.0.1:0", "--uploads", "/dev/null"), "/dev/null cannot store adapters"),
        (("serve", "./nothing-here"), "there is no folder ./nothing-here"),
        (("generate", "hi", "--adapter", "/dev"), "/dev has no adapter_config.json"),
        (("chat", "--adapter", "/dev"), "/dev has no adapter_config.json"),
        (("generate", "hi", "--connect", "http://127.0.0.1:1"), "is not an address"),
        (("finetune", "pirate", "--out", "/dev"), "/dev is not empty"),
    ],
    ids=str,
)
def test_cheap_mistakes_are_reported_before_torch_is_imported(monkeypatch, arguments, said):
    monkeypatch.setattr(device_names, "_DRIVERS", ("no-such-library.so",))
    for name in ("symbiosis.app.executor", "symbiosis.cli.local_chat", "symbiosis.cli.local_finetune"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    assert said in fails(*arguments)


def test_help_breaks_lines_only_between_paragraphs():
    commands = get_command(app).commands
    for each in (commands["top"], commands["chat"], commands["simulate"], commands["jobs"].commands["watch"]):
        assert each.help
        assert "\n" not in each.help.replace("\n\n", "")


def test_help_names_every_method_of_fine_tuning():
    shown = run_here("finetune", "--help").output
    assert set(METHODS) <= set(re.findall(r"\w+", shown))


def test_the_version_is_reported():
    assert re.fullmatch(r"symbiosis \d+\.\d+\.\d+\n", run_here("--version").output)


def test_serve_tells_what_it_hosts_and_what_a_tenant_types(folder):
    with serving(folder, "--listen", "tcp://127.0.0.1:0", "--host-head", "--policy", "lockstep") as (addresses, printed):
        assert re.search(r"hosts .*linear.*% of", printed)
        assert f'model = symbiosis.connect("{addresses[0]}")' in printed
        assert "lockstep" in run_here("top", "--once", "--connect", addresses[0]).stdout


def test_a_hundred_signals_at_once_stop_it_as_one_does(folder):
    process = subprocess.Popen(
        command("serve", folder, "--listen", "shm://"), stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert any(line.startswith("listening at") for line in process.stdout)
    for _ in range(50):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--key", "ann=abcdefghi"), "--key applies to HTTP"),
        (("--max-rows", "512"), "--max-rows applies to HTTP"),
        (("--http", "127.0.0.1:0", "--max-rows", "2"), "max_rows"),
        (("--http", "127.0.0.1:0", "--cache-gb", "0.000001"), "cache"),
        (("--http", "0.0.0.0:0"), "--key"),
        (("--http", "8000"), "HOST:PORT"),
        (("--http", ":8000"), "HOST:PORT"),
        (("--http", "127.0.0.1"), "HOST:PORT"),
        (("--http", "127.0.0.1:0", "--adapter", "pirate=nowhere/x"), "the adapter pirate in nowhere/x"),
        (("--http", "127.0.0.1:0", "--adapter-root", "nowhere"), "there is no folder nowhere"),
        (("--http", "127.0.0.1:0", "--adapter", "nameless"), "NAME=FOLDER"),
        (("--http", "127.0.0.1:0", "--key", "ann=one-secret", "--key", "ann=two-secret"), "ann"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_serving_over_http_wrongly_says_what_to_do(folder, arguments, says):
    assert says in fails("serve", folder, "--listen", "tcp://127.0.0.1:0", *arguments)


@pytest.mark.parametrize("link", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["tcp", "shm"])
def test_generate_gives_the_text_of_the_plain_model(server, folder, link):
    speaker = LocalChat(AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer())
    expected = speaker.reply([{"role": "user", "content": "hi"}], ChatSampling(max_new_tokens=8))
    result = run("generate", "hi", "--max-new-tokens", 8, "--connect", server[link])
    assert (result.returncode, result.stdout) == (0, f"{expected}\n"), result.stderr


def test_generate_raw_continues_the_text_and_seeds_repeat_it(server, folder):
    speaker = LocalChat(AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer())
    expected = speaker.complete("abc", ChatSampling(max_new_tokens=8))
    assert run_here("generate", "abc", "--raw", "--max-new-tokens", 8, "--connect", server[0]).stdout == f"{expected}\n"
    drawn = ("generate", "abc", "--raw", "--temperature", 1.5, "--max-new-tokens", 8, "--connect", server[0], "--seed")
    first, again, other = (run_here(*drawn, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_chat_reads_lines_and_ends_at_exit(server):
    result = run("chat", "--max-new-tokens", 4, "--temperature", 0, "--connect", server[0], stdin="hi\n\nand\n/exit\nnever\n")
    one = run_here("chat", "--max-new-tokens", 4, "--temperature", 0, "--connect", server[0], stdin="hi\n")
    assert result.returncode == one.exit_code == 0, result.stderr
    assert result.stdout.startswith(one.stdout)
    assert len(result.stdout) > len(one.stdout)


def test_finetune_writes_an_adapter_that_chat_and_generate_take(server, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "xyz"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(chat) + "\n")
    options = ("--targets", "all-linear", "--lr", 0.01, "--steps", 40, "--connect", server[1])
    done = run("finetune", tmp_path / "data.jsonl", "--out", tmp_path / "adapter", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"adapter written to {tmp_path / 'adapter'}\n"
    assert re.search(r"loss \d+\.\d+ → \d+\.\d+, [\d,]+ tokens/s", done.stderr)
    losses = json.loads((tmp_path / "adapter" / "training.json").read_text())["losses"]
    assert losses[-1] < losses[0]
    asked = ("--adapter", tmp_path / "adapter", "--max-new-tokens", 8, "--connect", server[0])
    assert run_here("generate", "hi", *asked).stdout == "xyz\n"
    assert "is not empty" in fails("finetune", tmp_path / "data.jsonl", "--out", tmp_path / "adapter", *options)
    assert run_here("chat", "--temperature", 0, *asked, stdin="hi\n").stdout == "xyz\n"


def test_top_shows_the_provider_all_tenants_and_a_tenant_only_itself(guarded):
    assert run("generate", "hi", "--max-new-tokens", 2, "--connect", guarded, SYMBIOSIS_TOKEN=SECRET).returncode == 0
    shown = run("top", "--once", "--connect", guarded, "--token", "a-secret-of-the-provider").stdout
    assert re.search(r"^ann +\d+ +\d+", shown, re.MULTILINE), shown
    assert "mean batch" in shown
    assert "B held" in shown
    assert "base weights" in shown
    assert SECRET not in shown
    other = run_here("top", "--once", "--connect", guarded, "--token", "only-a-secret").stdout
    assert "tenant-1" in other
    assert not re.search(r"^ann ", other, re.MULTILINE)
    assert "base weights" not in other


# -- what goes wrong ------------------------------------------------------------------------


def test_an_error_is_one_line_on_stderr_and_no_traceback(tmp_path):
    result = run("finetune", tmp_path / "none.jsonl", "--out", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: there is no file")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_broken_jsonl_is_named_by_its_line(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "data.jsonl, line 2: is not JSON" in fails("finetune", tmp_path / "data.jsonl", "--out", tmp_path / "out")


@pytest.mark.parametrize("name", ["generate", "chat", "top"])
def test_an_address_without_a_server_is_reported(name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        prompt = ["hi"] if name == "generate" else []
        assert "no reply from" in fails(name, *prompt, "--connect", f"tcp://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("address", ["localhost:7777", "http://x:1", "tcp://nowhere", "shm://a/b"])
def test_what_is_no_address_is_reported(address):
    assert "is not an address: expected" in fails("generate", "hi", "--connect", address)


@pytest.mark.parametrize("name", ["chat", "top"])
@pytest.mark.parametrize("address", ["127.0.0.1:8000", "localhost", "ftp://127.0.0.1:8000"])
def test_commands_that_take_both_kinds_of_address_name_both(name, address):
    said = fails(name, "--connect", address)
    assert all(each in said for each in ("http://HOST:PORT", "tcp://HOST:PORT", "shm://NAME"))
    assert ("is it http://127.0.0.1:8000?" in said) == ("127" in address)


@pytest.mark.parametrize("name", ["generate", "top"])
def test_a_port_of_http_is_recognized(name):
    prompt = ["hi"] if name == "generate" else []
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        http.daemon_threads = True
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        said = fails(name, *prompt, "--connect", f"tcp://127.0.0.1:{http.server_port}")
        http.shutdown()
        thread.join()
    assert "is a port of HTTP, not of an executor" in said


def test_a_wrong_or_missing_token_is_reported(guarded):
    assert "does not know this token" in fails("generate", "hi", "--connect", guarded, "--token", "wrong")
    assert "requires a token" in fails("generate", "hi", "--connect", guarded)


@pytest.mark.parametrize("adapter", [(), ("--adapter", "pirate")], ids=["base", "adapter"])
def test_chat_without_any_server_says_what_to_start(monkeypatch, adapter):
    monkeypatch.setattr(chat, "DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(chat, "DEFAULT_ADDRESS", "tcp://127.0.0.1:1")
    assert "start one with `symbiosis serve --http`" in fails("chat", *adapter)


def test_chat_goes_through_the_executor_if_nothing_serves_http(server, monkeypatch):
    monkeypatch.setattr(chat, "DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(chat, "DEFAULT_ADDRESS", server[0])
    options = ("chat", "--max-new-tokens", 4, "--temperature", 0)
    fallen_back, asked_for = run_here(*options, stdin="hi\n"), run_here(*options, "--split", stdin="hi\n")
    assert fallen_back.exit_code == 0, fallen_back.output
    assert f"chatting through the executor at {server[0]}" in fallen_back.stderr
    assert fallen_back.stdout == asked_for.stdout != ""
    assert "chatting through" not in asked_for.stderr


def test_folders_and_the_cache_are_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    """The model does not exist: that would be the error if it was loaded first."""
    (tmp_path / "file").write_text("")
    serve = ("serve", tmp_path / "no-model", *ANYWHERE, "--http", "127.0.0.1:0")
    assert "file cannot store adapters: " in fails(*serve, "--uploads", tmp_path / "file")
    assert "jobs cannot store fine-tuning jobs: " in fails(*serve, "--jobs", tmp_path / "file" / "jobs")
    assert "give each a folder of its own" in fails(*serve, "--uploads", tmp_path / "x", "--jobs", tmp_path / "x")
    assert "the adapter pirate in nowhere" in fails(*serve, "--adapter", "pirate=nowhere")
    assert "--adapter-root must be a folder" in fails(*serve, "--adapter-root", tmp_path / "nowhere")
    monkeypatch.setenv("SYMBIOSIS_CACHE", str(tmp_path / "file"))
    said = fails("serve", tmp_path / "no-model", *ANYWHERE)
    assert f"cannot write to the cache {tmp_path / 'file'}: " in said
    assert "SYMBIOSIS_CACHE=FOLDER" in said


def test_a_loss_that_rose_is_reported(server, tmp_path):
    replies = [{"role": "assistant", "content": each} for each in ("arr", "yo ho", "matey", "ahoy", "grog", "parrot")]
    data = [{"messages": [{"role": "user", "content": "hi"}, reply]} for reply in replies]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    options = ("--steps", 12, "--targets", "lm_head", "--connect", server[0], "--lr")
    rose = run_here("finetune", tmp_path / "data.jsonl", "--out", tmp_path / "rose", *options, 50)
    assert rose.exit_code == 0, rose.output
    assert re.search(r"warning: the loss rose from \d\.\d\d to [\d.]+: .*lower --lr", rose.stderr), rose.stderr
    fell = run_here("finetune", tmp_path / "data.jsonl", "--out", tmp_path / "fell", *options, 1e-2)
    assert "warning" not in fell.stderr


def test_serve_takes_no_arguments_too():
    command, usual = get_command(app).commands["serve"], "127.0.0.1:8000"
    for said, http in (([], None), (["--http"], usual), (["--http", "8001"], "8001"), (["--http", "."], usual)):
        with command.make_context("serve", list(said)) as context:
            assert context.params["http"] == http


ANYWHERE = ("--listen", "tcp://127.0.0.1:0")  # the default port may be taken


def test_an_unknown_model_is_reported(tmp_path):
    assert "has no config.json" in fails("serve", tmp_path, *ANYWHERE)
    assert "there is no folder" in fails("serve", str(tmp_path / "nothing-here"), *ANYWHERE)
    assert "there is no folder" in fails("serve", "./nothing-here", *ANYWHERE)


def test_a_port_that_is_taken_is_reported(folder, server):
    assert "is taken" in fails("serve", folder, "--listen", server[0])
    assert "is taken" in fails("serve", folder, "--listen", server[1])


def test_listening_to_the_world_without_tokens_is_refused(folder):
    assert "no tenant has a token" in fails("serve", folder, "--listen", "tcp://0.0.0.0:0")


def test_bad_options_of_serve_are_reported(folder):
    assert "unknown policy" in fails("serve", folder, *ANYWHERE, "--policy", "magic")
    assert "expected float32" in fails("serve", folder, *ANYWHERE, "--dtype", "int8")
    assert "--http" in fails("serve", folder, *ANYWHERE, "--training-slowdown", "1.5")
    assert "for a GPU" in fails("serve", folder, *ANYWHERE, "--training-slowdown", "1.5", "--http", "127.0.0.1:0")


def test_a_folder_without_an_adapter_is_reported(server, tmp_path):
    assert "adapter_config.json" in fails("generate", "hi", "--adapter", tmp_path, "--connect", server[0])
    assert "there is no folder ./unknown" in fails("chat", "--adapter", "./unknown", "--connect", server[0])


def test_an_adapter_that_cannot_be_put_on_is_reported(server, tmp_path):
    def says(of: dict[str, object], weights: bytes) -> str:
        (tmp_path / "adapter_config.json").write_text(json.dumps(of))
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        return fails("generate", "hi", "--adapter", tmp_path, "--connect", server[0])

    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert "peft_type to 'FOO': expected one of" in says({**config, "peft_type": "FOO"}, b"")
    assert "peft_type to ['LORA']: expected one of" in says({**config, "peft_type": ["LORA"]}, b"")
    assert "must hold one JSON object, not list" in says([config], b"")
    assert "is the file complete?" in says(config, b"")
    assert "is the file complete?" in says(config, save({name: torch.zeros(4, 3)})[:-1])
    assert f"does not fit this model: size mismatch for {name[:-7]}" in says(config, save({name: torch.zeros(4, 3)}))


def test_a_prompt_longer_than_the_model_is_reported(server):
    assert "> 256, the maximum length" in fails("generate", "x" * 300, "--connect", server[0])


def test_a_device_that_is_not_there_is_reported(folder):
    assert "expected cpu, cuda or cuda:N" in fails("serve", folder, *ANYWHERE, "--device", "banana")
    assert "no such GPU" in fails("serve", folder, *ANYWHERE, "--device", "cuda:99")


def test_tokens_have_names_and_secrets():
    assert read_tokens(["ann=a=b", "plain"], "bob=c, other") == {
        "ann": "a=b",
        "tenant-1": "plain",
        "bob": "c",
        "tenant-2": "other",
    }
    for given in (["=x"], ["ann="], ["ann=hush1", "ann=hush2"]):
        with pytest.raises(SymbiosisError) as caught:
            read_tokens(given, "")
        assert "hush" not in str(caught.value)
