"""`symbiosis serve --http --shards N`: real processes that serve and train with one model between them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from openai import APIError, OpenAI
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import symbiosis
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling
from tests.cli.test_main import run
from tests.tiny_chat import tiny_tokenizer

PROMPT = [5, 9, 70, 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny: LlamaForCausalLM) -> tuple[Path, Path]:
    """The tiny model, and an adapter of it."""
    path = tmp_path_factory.mktemp("sharded")
    tiny.save_pretrained(path / "tiny")
    tiny_tokenizer().save_pretrained(path / "tiny")
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True, init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(path / "tiny"), config).save_pretrained(path / "mine")
    return path / "tiny", path / "mine"


@contextmanager
def served(folders: tuple[Path, Path]) -> Iterator[tuple[subprocess.Popen[str], list[str], OpenAI]]:
    """The process, the addresses of its executors, and a client of its API."""
    model, adapter = folders
    command = [sys.executable, "-m", "symbiosis", "serve", str(model), "--listen", "tcp://127.0.0.1:0", "--shards", "2"]
    command += ["--http", "127.0.0.1:0", "--adapter", f"mine={adapter}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    addresses: list[str] = []
    assert process.stdout is not None
    while len(addresses) < 3:
        line = process.stdout.readline()
        assert line, "it ended before it listened"
        addresses += re.findall(r"listening at (\S+)", line)
    (url,) = [address for address in addresses if address.startswith("http")]
    try:
        yield process, [address for address in addresses if address != url], OpenAI(base_url=f"{url}/v1", api_key="-")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def complete(client: OpenAI, model: str) -> tuple[str, list[float]]:
    done = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=1, seed=1)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    return done.choices[0].text, list(logprobs.token_logprobs or ())


def complete_here(core: EngineCore, adapter: str | None) -> list[float]:
    """The log probabilities of the greedy tokens, by an engine of this process."""
    core.add(PROMPT, Sampling(temperature=0.0, max_tokens=12, logprobs=1), adapter=adapter)
    found: list[float] = []
    while not core.is_idle():
        found += [logprobs.chosen for _, _, logprobs in core.step() if logprobs is not None]
    return found


def complete_often(client: OpenAI) -> None:
    for _ in range(1000):
        complete(client, "tiny")


def test_all_three_ways_in_give_what_one_process_gives(folders, tiny, ids, tmp_path):
    models = ["tiny", "mine"]
    core = EngineCore(LlamaForCausalLM.from_pretrained(folders[0]), pages=64)
    core.add_adapter("mine", folders[1])
    expected = [complete_here(core, None if model == "tiny" else model) for model in models]
    with served(folders) as (process, addresses, client):
        for model, logprobs in zip(models, expected, strict=True):
            assert complete(client, model)[1] == pytest.approx(logprobs, abs=1e-3)
        for address in addresses:
            tenant = symbiosis.connect(address)
            torch.testing.assert_close(tenant(ids).logits, tiny(ids).logits, atol=1e-5, rtol=0)
            tenant.symbiosis.close()
        data = tmp_path / "data.jsonl"
        data.write_text('{"prompt": "a b", "completion": "c d"}\n' * 8)
        with data.open("rb") as file:
            uploaded = client.files.create(file=file, purpose="fine-tune")
        job = client.fine_tuning.jobs.create(training_file=uploaded.id, model="tiny", hyperparameters={"n_epochs": 1})
        while client.fine_tuning.jobs.retrieve(job.id).status not in ("succeeded", "failed"):
            assert process.poll() is None
        finished = client.fine_tuning.jobs.retrieve(job.id)
        assert finished.status == "succeeded", finished.error
        assert finished.fine_tuned_model is not None
        assert complete(client, finished.fine_tuned_model)[1]


@pytest.mark.slow
def test_a_dead_shard_ends_requests_in_an_error(folders):
    with served(folders) as (process, _, client):
        (child,) = [each for each in psutil.Process(process.pid).children() if "serve" in each.cmdline()]
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        child.kill()
        with pytest.raises(APIError):
            complete_often(client.with_options(max_retries=0, timeout=60))
        assert process.wait(90) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shards", "says"),
    [
        ("llama", "3", "has 2 key-value heads, which 3 shards cannot divide: expected at most 2 shards"),
        ("gpt2", "2", "transformers has no tensor-parallel plan of it"),
    ],
)
def test_a_model_that_cannot_be_divided_is_one_line(folders, tmp_path, kind, shards, says):
    GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=2, n_embd=32, n_layer=1, n_head=4)).save_pretrained(
        tmp_path
    )
    folder = folders[0] if kind == "llama" else tmp_path
    done = run("serve", folder, "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--shards", shards)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert says in errors[0]
