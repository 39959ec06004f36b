"""A real server: a tiny random model with adapters, its HTTP process, and the real `openai` client."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.server.adapter_store import StoreLimits
from tests.tiny_chat import TEMPLATE, make_tiny_chat, tiny_tokenizer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
WIDE = LoraConfig(r=9, target_modules=["k_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
IA3 = IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
KINDS = {"pirate": LORA, "poet": WIDE, "judge": IA3, "cook": LORA}
CHAT = [{"role": "user", "content": "hello there"}]


@dataclass
class World:
    """A model's folder, plain models to compare with, and their adapters' folders."""

    folder: Path
    root: Path
    models: dict[str | None, Any]

    def greedy(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens by whole forward passes, up to the end of text."""
        ids, model = list(prompt), self.models[name]
        with torch.no_grad():
            while len(ids) < len(prompt) + count and ids[-1] != 1:
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def says(self, name: str | None, prompt: str, count: int) -> str:
        """The text that plain PEFT gives."""
        tokenizer = tiny_tokenizer()
        return tokenizer.decode(self.greedy(name, tokenizer(prompt)["input_ids"], count), skip_special_tokens=True)

    def answers(self, name: str | None, messages: list[dict[str, str]], count: int) -> str:
        text = tiny_tokenizer(TEMPLATE).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.says(name, text, count)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("world")
    folder = make_tiny_chat(root / "tiny")
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    models: dict[str | None, Any] = {None: base}
    for number, (name, config) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        model = get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(root / "adapters" / name)
        models[name] = model
    return World(folder, root / "adapters", models)


@dataclass
class Site:
    """A running server and ways to ask it."""

    url: str
    hosting: Any
    executor: Any

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_client(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **options)

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx2.Response:
        headers = {**({} if key is None else {"Authorization": f"Bearer {key}"}), **options.pop("headers", {})}
        # without certificates, which take longer to load than the answer takes
        return httpx2.request(method, f"{self.url}{path}", headers=headers, timeout=60, verify=False, **options)

    def metric(self, name: str, key: str | None = None) -> float:
        lines = self.ask("GET", "/metrics", key).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="session")
def start():
    """Start servers: `start(folder, keys=…)`; all are closed at the end."""
    started: list[Site] = []

    def begin(folder: Path, **options: Any) -> Site:
        executor = symbiosis.Executor(folder, hosting=True)
        hosting = executor.host("127.0.0.1:0", **options)
        started.append(Site(hosting.url, hosting, executor))
        return started[-1]

    yield begin
    for site in started:
        site.hosting.close()
        site.executor.close()


ANN, BOB, CHIEF = "a secret of ann's", "a secret of bob's", "a secret of the chief's"


@pytest.fixture(scope="session")
def uploads(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="session")
def hotel(world, start, uploads) -> Site:
    """Two tenants, an admin, one adapter for everybody, and room for two more of each."""
    return start(
        world.folder,
        keys={"ann": ANN, "bob": BOB},
        admin_key=CHIEF,
        adapters={"judge": world.root / "judge"},
        adapter_root=world.root,
        uploads=uploads,
        store_limits=StoreLimits(adapters=2, bytes=200_000),
    )


@pytest.fixture(scope="session")
def site(world, start) -> Site:
    """Without keys, with all adapters but the cook."""
    adapters = {name: world.root / name for name in KINDS if name != "cook"}
    return start(world.folder, adapters=adapters, adapter_root=world.root)
