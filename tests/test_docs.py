"""What the README and the examples show is run here, on the real default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from tests.tiny_chat import make_tiny_chat

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FINE_TUNING = (ROOT / "docs/fine-tuning.md").read_text()
USUAL = {"tcp": "tcp://127.0.0.1:7777", "http": "http://127.0.0.1:8000"}


@pytest.fixture(scope="module")
def served(real_cache):
    """`make serve` itself, with this Python and at free ports; its addresses by scheme."""
    ports = "--listen tcp://127.0.0.1:0 --http 127.0.0.1:0"
    command = ["make", "-o", ".venv/.ready", "serve", f"BIN={Path(sys.executable).parent}", f"ARGS={ports}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    found: dict[str, str] = {}
    try:
        for line in process.stdout:
            found |= {scheme: f"{scheme}://{rest}" for scheme, rest in re.findall(r"^listening at (\w+)://(\S+)", line)}
            if len(found) == 2:
                break
        assert set(found) == set(USUAL)
        yield found
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def address(served):
    return served["tcp"]


def here(text: str, served: dict[str, str]) -> str:
    """What the README says, at the addresses of this test."""
    for scheme, usual in USUAL.items():
        text = text.replace(usual, served[scheme])
    return text


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(code_or_file, *arguments, cwd):
    command = [sys.executable, "-c", code_or_file] if "\n" in code_or_file else [sys.executable, code_or_file, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.real
def test_the_readmes_tenant_gets_its_answer_and_its_adapter(served, tmp_path):
    code = blocks("python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    output = run(here(code, served), cwd=tmp_path)
    assert "Paris" in output
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.real
def test_the_readmes_openai_client_gets_its_answer(served, tmp_path):
    _, code, _ = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    assert "Paris" in run(here(code, served), cwd=tmp_path)


@pytest.mark.real
def test_the_readmes_curl_gets_its_answer(served):
    (command,) = [block for block in blocks("bash") if block.startswith("curl")]
    done = subprocess.run(["bash", "-c", here(command, served)], capture_output=True, text=True, timeout=60)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["text"], done.stderr


@pytest.mark.real
def test_the_openai_client_against_make_serve(served):
    client = openai.OpenAI(base_url=f"{served['http']}/v1", api_key="none", max_retries=0)
    (base,) = [model.id for model in client.models.list().data]
    ask = {"model": base, "messages": [{"role": "user", "content": "Count from one to five."}], "max_tokens": 24}
    likely = client.chat.completions.create(**ask, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    said = [each.token for each in likely.logprobs.content]
    assert "".join(said[:-1] if likely.finish_reason == "stop" else said) == likely.message.content
    stop = likely.message.content[5:9]
    stopped = client.chat.completions.create(**ask, temperature=0, stop=stop).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (likely.message.content.partition(stop)[0], "stop")
    several = client.chat.completions.create(**ask, temperature=1, seed=7, n=3)
    assert len({choice.message.content for choice in several.choices}) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, temperature=1, seed=7, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [choice.message.content for choice in several.choices]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ask, "model": "unknown"})
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.chat.completions.create(**{**ask, "max_tokens": 100_000})


@pytest.fixture
def chats(tmp_path):
    """The data of the page about fine-tuning: everything is answered as a pirate would."""
    data = (ROOT / "src/symbiosis/cli/demo_data/pirate.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text("".join(data.splitlines(keepends=True)[:5]))
    return tmp_path


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_fine_tuning_pages_client_teaches_and_gets_its_answer(served, chats):
    code, _ = blocks("python", FINE_TUNING)
    *events, answer = run(here(code, served), cwd=chats).strip().splitlines()
    assert events[0] == "The job has successfully completed"
    assert re.search("(?i)arr|matey|yo ho", answer), answer


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_readmes_fine_tuning_client_and_command(served, chats):
    *_, code = blocks("python")
    id = re.search(r"id='(ftjob-[^']+)'", run(here(code, served), cwd=chats)).group(1)
    client = openai.OpenAI(base_url=f"{served['http']}/v1", api_key="none", max_retries=0)
    while (job := client.fine_tuning.jobs.retrieve(id)).status != "succeeded":
        assert job.status in ("validating_files", "queued", "running")
        time.sleep(0.5)
    asked = [{"role": "user", "content": "Hello"}]
    assert client.chat.completions.create(model=job.fine_tuned_model, messages=asked, max_tokens=4).choices
    (command,) = [block.partition("#")[0].strip() for block in blocks("bash") if "--hosted" in block]
    assert command.endswith("--epochs 2 --lr 2e-3")
    command = command.replace("symbiosis ", f"{sys.executable} -m symbiosis ").replace("--epochs 2", "--steps 2")
    command += f" --connect {served['http']}"
    done = subprocess.run(["bash", "-ec", command], cwd=chats, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "is served: symbiosis chat --adapter ft-pirate-" in done.stdout


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_fine_tuning_pages_own_loop(real_cache, tmp_path):
    _, code = blocks("python", FINE_TUNING)
    output = run(code, cwd=tmp_path)
    loss, before, after = re.fullmatch(r"([\d.]+) (.*) → (.*)\n", output).groups()
    assert float(loss) < 3
    assert "marzipan" in after
    assert "marzipan" not in before
    assert (tmp_path / "by-hand" / "adapter_model.safetensors").is_file()


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_fine_tuning_pages_commands(served, chats):
    (commands,) = blocks("bash", FINE_TUNING)
    commands = commands.replace("symbiosis ", f"{sys.executable} -m symbiosis ").replace("--epochs 10", "--steps 2")
    commands = re.sub("(?m)$", f" --connect {served['http']}", commands.strip())
    done = subprocess.run(["bash", "-ec", commands], cwd=chats, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "is served: symbiosis chat --adapter ft-pirate-" in done.stdout
    assert "succeeded" in done.stdout
    assert (chats / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (chats / "pirate-lora" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.real
def test_two_tenants_example(real_cache, tmp_path):
    output = run(str(ROOT / "examples" / "two_tenants.py"), cwd=tmp_path)
    losses = {name: [float(x) for x in re.findall(rf"{name}: step \d+, loss ([\d.]+)", output)] for name in ("alice", "bob")}
    assert all(each[-1] < each[0] for each in losses.values())


@pytest.mark.slow
@pytest.mark.real
def test_engine_example(real_cache, tmp_path):
    output = run(str(ROOT / "examples" / "engine_with_adapters.py"), cwd=tmp_path)
    texts = dict(line.split(": ", 1) for line in output.splitlines())
    assert "Paris" in texts["base"]
    assert len(set(texts.values())) == 3, "each adapter changes the text"


@pytest.mark.slow
@pytest.mark.real
def test_studio_example(real_cache, tmp_path):
    output = run(str(ROOT / "examples" / "custom_training_loop.py"), str(tmp_path / "out"), cwd=tmp_path)
    assert "marzipan" in output
    assert (tmp_path / "out" / "bob" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.real
def test_trl_example(address, tmp_path):
    assert "loss" in run(str(ROOT / "examples" / "sft_with_trl.py"), address, cwd=tmp_path)


def test_every_curl_of_the_providers_page_is_answered(tmp_path):
    """In the order of the page, against the very `symbiosis serve` that it shows, of a tiny model at a free port."""
    base = LlamaForCausalLM.from_pretrained(make_tiny_chat(tmp_path / "tiny"))
    adapter = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter.save_pretrained(tmp_path / "adapters" / "pirate")
    adapter.save_pretrained(tmp_path / "my-adapter")
    serve, *curls = [block for block in blocks("bash", (ROOT / "docs/serving.md").read_text()) if "127.0.0.1:8000" in block]
    serve = serve.replace("symbiosis serve", f"exec {sys.executable} -m symbiosis serve tiny --listen shm://")
    process = subprocess.Popen(["bash", "-c", serve.replace(":8000", ":0")], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[2] for line in process.stdout if line.startswith("listening at http"))
        commands = re.findall(r"(?m)^curl .*(?:\n    .*)*", "\n".join(curls))
        assert len(commands) >= 8
        for command in commands:
            asked = command.replace("http://127.0.0.1:8000", url).replace("curl ", "curl -sS --fail-with-body ", 1)
            done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            assert done.stdout
    finally:
        process.terminate()
        process.communicate(timeout=60)


def run_bash(text: str, cwd: Path) -> str:
    commands = re.sub("(?m)^symbiosis ", f"{sys.executable} -m symbiosis ", text)
    done = subprocess.run(["bash", "-ec", commands], cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cluster_pages_simulation(tmp_path):
    simulation, _ = blocks("bash", (ROOT / "docs/cluster.md").read_text())
    output = run_bash(simulation, tmp_path)
    assert "GPU-hours" in output
    assert "static:4" in output
    assert (tmp_path / "cluster.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.real
def test_the_cluster_pages_profile(real_cache, tmp_path):
    _, profile = blocks("bash", (ROOT / "docs/cluster.md").read_text())
    assert "within the objective" in run_bash(profile, tmp_path)
    assert json.loads((tmp_path / "profile.json").read_text())["step_cost"]["kv_tokens"] > 0


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_are_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60
