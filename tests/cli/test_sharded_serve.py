"""`symbiosis serve --shards N`: real processes, an endpoint at each, and what happens when one dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

import symbiosis
from symbiosis.app.shard_processes import listen_address
from symbiosis.errors import SymbiosisError
from tests.cli.test_main import fails, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: LlamaForCausalLM) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_pretrained(path)
    return path


@pytest.fixture
def sharded(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Two shards, and the addresses at which they listen."""
    command = [sys.executable, "-m", "symbiosis", "serve", str(folder), "--shards", "2", "--listen", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    addresses: list[str] = []
    assert process.stdout is not None
    while len(addresses) < 2:
        line = process.stdout.readline()
        assert line, "it ended before it listened"
        addresses += re.findall(r"listening at (\S+)", line)
    yield process, addresses
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_every_shard_serves_tenants_and_all_end_together(sharded, tiny, ids):
    process, addresses = sharded
    children = psutil.Process(process.pid).children()
    assert len(set(addresses)) == 2
    assert len(children) == 1
    for address in addresses:
        model = symbiosis.connect(address)
        torch.testing.assert_close(model(ids).logits, tiny(ids).logits, atol=1e-5, rtol=0)
        model.symbiosis.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not any(child.is_running() for child in children)


def call_often(model: torch.nn.Module, ids: torch.Tensor) -> None:
    for _ in range(1000):
        model(ids)


@pytest.mark.parametrize("victim", [pytest.param("leader", marks=pytest.mark.slow), "child"])
def test_a_dead_shard_ends_in_an_error_for_every_tenant(sharded, ids, victim):
    process, addresses = sharded
    (child,) = psutil.Process(process.pid).children()
    models = [symbiosis.connect(address, grace_s=2.0) for address in addresses]
    for model in models:
        model(ids)
    (child if victim == "child" else process).kill()
    started = time.monotonic()
    for model in models:
        with pytest.raises(SymbiosisError):
            call_often(model, ids)
    assert time.monotonic() - started < 60
    if victim == "child":
        assert process.wait(60) == 1
    assert psutil.wait_procs([child], 60)[1] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shards", "1"), "--shards 1: expected at least 2"),
        (("--shards", "2", "--sharding", "magic"), "unknown sharding 'magic': expected one of auto, tensor, parameters"),
        (("--sharding", "tensor"), "--sharding applies to shards: add --shards N"),
        (("--shards", "2", "--device", "cuda:1"), "expected cpu or cuda"),
    ],
)
def test_wrong_options_are_one_line(folder, arguments, says):
    assert says in fails("serve", folder, "--listen", "tcp://127.0.0.1:0", *arguments)


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    done = run("serve", tmp_path, "--listen", "tcp://127.0.0.1:0", "--shards", "2")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert "has no config.json" in line


def test_shards_listen_at_addresses_of_their_own():
    assert listen_address("tcp://127.0.0.1:7777", 0) == "tcp://127.0.0.1:7777"
    assert listen_address("tcp://127.0.0.1:7777", 3) == "tcp://127.0.0.1:7780"
    assert listen_address("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"
    assert listen_address("shm://base", 1) == "shm://base-1"
    assert listen_address("shm://", 1) == "shm://"
