"""`symbiosis serve --zoo`: a real process that serves the models of a zoo, with the `openai` client."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from symbiosis.cli.main import app
from symbiosis.zoo.zoo import Zoo
from tests.serving.chains.chain_world import fine_tuned
from tests.tiny_chat import make_tiny_chat, tiny_tokenizer

ADMIN, ANN = "the key of the admin", "the key of ann"
PROMPTS = ["hello", "what is it", "once upon a time there was"]


@dataclass
class ZooWorld:
    folder: Path
    zoo: Path
    models: dict[str, Any]

    def says(self, name: str, prompt: str, count: int = 8) -> str:
        """Greedy text of the reference, without a KV cache."""
        tokenizer, model = tiny_tokenizer(), self.models[name]
        ids = start = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            while len(ids) < len(start) + count and (len(ids) == len(start) or ids[-1] != 1):
                ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        return tokenizer.decode(ids[len(start) :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> ZooWorld:
    """Three models, an adapter on one of them, and a model of another shape."""
    folder = tmp_path_factory.mktemp("zoo-world")
    base = AutoModelForCausalLM.from_pretrained(make_tiny_chat(folder / "base")).eval()
    models = {
        "base": base, "pirate": fine_tuned(base, ".layers.1.", seed=1), "Base": fine_tuned(base, "", seed=2),
    }  # fmt: skip
    zoo = Zoo(folder / "zoo", create=True)
    zoo.add("base", folder / "base")
    for name, model in list(models.items())[1:]:
        model.save_pretrained(folder / f"model-{name}")
        tiny_tokenizer().save_pretrained(folder / f"model-{name}")
        zoo.add(name, folder / f"model-{name}")
    for name, on in (("poet", "pirate"), ("uploaded", "pirate")):
        torch.manual_seed(len(name))
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        copied = AutoModelForCausalLM.from_pretrained(folder / f"model-{on}")
        adapted = get_peft_model(copied, config).eval()
        adapted.peft_config["default"].base_model_name_or_path = f"models/{on}"
        adapted.save_pretrained(folder / name)
        models[name] = adapted
    zoo.add("poet", folder / "poet", base="pirate")
    deeper = type(base)(type(base.config)(**{**base.config.to_dict(), "num_hidden_layers": 3}))
    deeper.save_pretrained(folder / "deeper")
    zoo.add("deeper", folder / "deeper")
    return ZooWorld(folder, folder / "zoo", models)


@dataclass
class ServedZoo:
    url: str
    lines: list[str]

    def client(self, key: str = ANN) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def complete(self, model: str, prompt: str) -> str:
        made = self.client().completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
        assert made.model == model
        return made.choices[0].text


@pytest.fixture(scope="module")
def served(world) -> Iterator[ServedZoo]:
    command = [sys.executable, "-m", "symbiosis", "serve", "--zoo", world.zoo, "--models", "base,pirate,Base,poet,deeper"]
    command += ["--http", "127.0.0.1:0", "--listen", "tcp://127.0.0.1:0", "--key", f"ann={ANN}", "--admin-key", ADMIN]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if match := re.match(r"listening at (http://\S+)", line):
                yield ServedZoo(match[1], lines)
                break
        process.terminate()
        process.wait(30)
    assert any(line.startswith("listening at http") for line in lines), lines


def test_each_model_and_adapter_answers_by_its_name(world, served):
    requests = [(name, prompt) for prompt in PROMPTS for name in ("base", "pirate", "Base", "poet")]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: served.complete(*request), requests))
    assert answers == [world.says(name, prompt) for name, prompt in requests]
    assert len({served.complete(name, PROMPTS[2]) for name in ("base", "pirate", "Base", "poet")}) == 4


def test_models_are_listed_adapters_with_their_base(served):
    listed = {model.id: model.model_extra["parent"] for model in served.client().models.list()}
    assert listed == {"base": None, "pirate": None, "Base": None, "poet": "pirate"}
    assert served.client().models.retrieve("Base").id == "Base"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("deeper")
    with pytest.raises(openai.NotFoundError):
        served.complete("deeper", "hello")


def test_an_uploaded_adapter_is_for_the_model_that_its_config_names(world, served):
    files = {
        "config": (world.folder / "uploaded" / "adapter_config.json").read_bytes(),
        "weights": (world.folder / "uploaded" / "adapter_model.safetensors").read_bytes(),
    }
    with httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {ANN}"}) as client:
        refused = client.put("/v1/adapters/pirate", files=files)
        assert refused.status_code == 400
        assert "is the name of a model" in refused.text
        made = client.put("/v1/adapters/uploaded", files=files)
        assert made.status_code == 201, made.text
        assert made.json()["parent"] == "pirate"
    for prompt in PROMPTS:
        assert served.complete("uploaded", prompt) == world.says("uploaded", prompt)
        assert served.complete("pirate", prompt) == world.says("pirate", prompt)


def test_what_is_served_is_printed_and_counted_by_model(served):
    shown = "\n".join(served.lines)
    assert re.search(r"3 models and 1 adapters in \d+ blocks: .* in memory, .* as copies\. The default is base", shown)
    assert "deeper is not served: its num_hidden_layers is 3, that of base is 2" in shown
    served.complete("Base", "hello")
    with httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {ADMIN}"}) as client:
        models = client.get("/v1/statistics").json()["serving"]["models"]
        metrics = client.get("/metrics").text
    assert models.keys() == {"base", "pirate", "Base"}
    assert models["Base"]["requests"] >= 1
    assert models["Base"]["tokens"] >= 1
    assert 'symbiosis_model_completions_total{model="Base"}' in metrics
    assert 'symbiosis_model_tokens_total{model="pirate"}' in metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL"], "--zoo serves the models of a zoo: leave out MODEL"),
        (["--shards", 2], "leave out --shards"),
        (["--models", "base,,pirate"], "different names, separated by commas"),
        (["--models", "base,unknown"], "the zoo has no model 'unknown': expected some of Base, base, deeper, pirate, poet"),
    ],
)
def test_wrong_options_are_one_line(world, options, message):
    assert message in _fails("--zoo", world.zoo, "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", *options)


def test_models_without_a_zoo_an_empty_one_and_a_folder_that_is_none_are_one_line(tmp_path):
    assert "add --zoo FOLDER" in _fails("--models", "a")
    options = ("--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0")
    assert "is no zoo" in _fails("--zoo", tmp_path, *options)
    Zoo(tmp_path / "zoo", create=True)
    assert "the zoo is empty" in _fails("--zoo", tmp_path / "zoo", *options)


def test_a_changed_block_is_one_line(world, tmp_path):
    shutil.copytree(world.zoo, tmp_path / "zoo")
    block = Zoo(tmp_path / "zoo").manifest("pirate").chain[3].object.sha256
    path = tmp_path / "zoo" / "objects" / block[:2] / block
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    options = ("--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0")
    assert "attention 1 was changed" in _fails("--zoo", tmp_path / "zoo", *options)
    path.unlink()
    assert "is missing" in _fails("--zoo", tmp_path / "zoo", *options)


def test_a_zoo_that_does_not_fit_is_one_line_with_the_number_of_models_that_do(world, monkeypatch):
    from symbiosis.app import served_zoo

    monkeypatch.setattr(served_zoo, "free_memory", lambda device: 4_600_000)
    options = ("--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--cache-gb", 0.004)
    line = _fails("--zoo", world.zoo, *options)
    assert re.search(r"does not fit on cpu: .* needed \(\d+ blocks .*, KV cache .*\), .* available", line)
    assert re.search(r"[1-4] of the 4 models fit, in the order of --models; serve some with --models NAME,NAME", line)


def _fails(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["serve", *map(str, arguments)], env={"COLUMNS": "400"})
    assert done.exit_code == 1, done.output
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    return line
