"""A real server: a tiny random model with adapters, its HTTP process, and the `openai` client."""

from __future__ import annotations

import copy
import os
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
from symbiosis.jobs.queue import JobLimits
from symbiosis.server.adapter_store import StoreLimits
from tests.tiny_chat import TEMPLATE, make_tiny_chat, tiny_tokenizer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
WIDE = LoraConfig(r=9, target_modules=["k_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
IA3 = IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
KINDS = {"pirate": LORA, "poet": WIDE, "judge": IA3, "cook": LORA}
WORKERS = int(os.environ.get("SYMBIOSIS_TEST_WORKERS", "1"))
"""HTTP workers of servers whose test asks for none: `make workers` runs the tests with several."""
CHAT = [{"role": "user", "content": "hello there"}]


@dataclass
class World:
    """Folders of the model and its adapters, and plain PEFT models as the reference."""

    folder: Path
    root: Path
    models: dict[str | None, Any]

    def greedy(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens of the reference, without a KV cache, up to the end of text."""
        ids, model = list(prompt), self.models[name]
        with torch.no_grad():
            while len(ids) < len(prompt) + count and ids[-1] != 1:
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def says(self, name: str | None, prompt: str, count: int) -> str:
        """Greedy text of the reference."""
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
class RunningServer:
    """A running server and its clients."""

    url: str
    hosting: Any
    executor: Any

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_client(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **options)

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx2.Response:
        headers = {**({} if key is None else {"Authorization": f"Bearer {key}"}), **options.pop("headers", {})}
        # verify=False: loading certificates takes longer than the request
        return httpx2.request(method, f"{self.url}{path}", headers=headers, timeout=60, verify=False, **options)

    def metric(self, name: str, key: str | None = None) -> float:
        lines = self.ask("GET", "/metrics", key).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="session")
def start():
    """`start(folder, keys=…)` starts a server; all are closed at the end."""
    started: list[RunningServer] = []

    def begin(folder: Path, **options: Any) -> RunningServer:
        executor = symbiosis.Executor(folder, hosting=True)
        hosting = executor.host("127.0.0.1:0", **{"workers": WORKERS, **options})
        started.append(RunningServer(hosting.url, hosting, executor))
        return started[-1]

    yield begin
    for server in started:
        server.hosting.close()
        server.executor.close()


ANN, BOB, CHIEF = "a secret of ann's", "a secret of bob's", "a secret of the chief's"


@pytest.fixture(scope="session")
def uploads(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="session")
def keyed_server(world, start, uploads) -> RunningServer:
    """Two tenants, an admin, one shared adapter, and a quota of two adapters per owner."""
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
def server(world, start) -> RunningServer:
    """Without keys, with all adapters but `cook`."""
    adapters = {name: world.root / name for name in KINDS if name != "cook"}
    return start(world.folder, adapters=adapters, adapter_root=world.root)


@pytest.fixture(scope="session")
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
