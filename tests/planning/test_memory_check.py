"""What cannot fit is refused with the figures before it is loaded: by serve, connect and the trainer's process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM

import symbiosis
from symbiosis.app.planning.job_memory import JobMemory
from symbiosis.errors import DoesNotFit
from symbiosis.planning.memory_check import check_fits, check_server
from symbiosis.planning.model_size import ModelSize
from tests.conftest import tiny_config

CPU = torch.device("cpu")


def test_the_error_has_the_figures_and_what_to_do():
    with pytest.raises(
        DoesNotFit, match=r"3 GB needed \(weights 2 GB, KV cache 1 GB\), 1 GB available, 2 GB missing: wait"
    ) as error:
        check_fits("it", {"weights": 2 * 10**9, "KV cache": 10**9, "none": 0}, CPU, "wait", available=10**9)
    assert (error.value.needed, error.value.available) == (3 * 10**9, 10**9)
    check_fits("it", {"weights": 10**9}, CPU, "wait", available=10**9)


def test_a_server_needs_its_weights_and_with_http_its_kv_cache():
    size = ModelSize.of(tiny_config())
    check_server(size, CPU, hosting=False, available=size.weights)
    check_server(size, CPU, hosting=False, shards=2, available=size.weights // 2)
    with pytest.raises(DoesNotFit, match="base weights"):
        check_server(size, CPU, hosting=False, available=size.weights - 1)
    with pytest.raises(DoesNotFit, match="KV cache 1 GB"):
        check_server(size, CPU, hosting=True, cache_bytes=10**9, available=10**9)


def test_serve_refuses_a_model_that_does_not_fit_before_it_loads_it(tmp_path):
    """A config of a 340 GB model, without weights."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 48, "num_attention_heads": 128}
    tiny_config(**sizes, num_key_value_heads=8, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "symbiosis", "serve", str(tmp_path), "--listen", "tcp://127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    for said in ("does not fit on cpu", "needed (base weights", "available", "missing", "symbiosis plan"):
        assert said in line


def test_connect_refuses_a_client_part_that_does_not_fit(tiny, monkeypatch):
    with symbiosis.Executor(tiny) as executor:
        address = executor.listen("tcp://127.0.0.1:0")
        monkeypatch.setattr("symbiosis.planning.memory_check.available_memory", lambda: 1000)
        with pytest.raises(DoesNotFit, match=r"the tenant's part of .* does not fit on cpu: .*client part .*1 kB available"):
            symbiosis.connect(address)
        monkeypatch.undo()
        symbiosis.connect(address).symbiosis.close()


def test_a_job_is_refused_by_the_length_of_its_examples():
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=6))
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    memory = JobMemory(model, free=lambda device: 20_000_000)
    memory.check(adapter, 64)
    with pytest.raises(DoesNotFit, match=r"a job with examples of 4096 tokens does not fit on cpu: .* lower max_length"):
        memory.check(adapter, 4096)
    JobMemory(model, free=lambda device: 10**12).check(adapter, 4096)


def test_layers_that_are_left_out_of_a_dry_run_are_counted():
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    few, many = (
        JobMemory(LlamaForCausalLM(tiny_config(num_hidden_layers=layers)))._estimate(adapter, 128) for layers in (4, 8)
    )
    exact = JobMemory(LlamaForCausalLM(tiny_config(num_hidden_layers=8)))._run_layers(None, adapter, 128)
    assert many[0] == exact[0] == 2 * few[0]
    assert abs(many[1] / exact[1] - 1) < 0.02
