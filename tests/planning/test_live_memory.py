"""Dry runs count what the same code allocates with values."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import symbiosis
from symbiosis.app.planning.dry_model import run_prefill, run_training_pass
from symbiosis.app.planning.dry_tenant import run_tenant
from symbiosis.planning.live_memory import LiveMemory, dry_run
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.tenants import parse_tenants
from tests.conftest import tiny_config


def test_storages_count_from_creation_until_they_are_freed():
    with LiveMemory() as memory:
        x = torch.zeros(1000)
        y = x.view(10, 100)
        assert memory.live == 4000, "a view shares the storage"
        z = x + 1
        assert (memory.live, memory.peak) == (8000, 8000)
        del x, y
        assert (memory.live, memory.peak) == (4000, 8000)
        memory.reset_peak()
        z.add_(1)
        assert memory.peak == 4000


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_dry_run_has_the_peak_of_a_real_step(checkpointed):
    def step() -> int:
        with LiveMemory() as memory:
            layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
            x = torch.zeros(32, 64, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            x.sum().backward()
            return memory.peak

    with dry_run():
        planned = step()
    assert planned == step()


def test_modules_of_a_dry_run_can_be_moved_and_others_are_moved_as_before():
    real = nn.Linear(4, 4)
    with dry_run():
        made = nn.Linear(4, 4).to(torch.bfloat16)
        assert made.weight.dtype is torch.bfloat16
    assert real.to(torch.float64).weight.dtype is torch.float64


@pytest.mark.parametrize("targets", ["q_proj+v_proj", "q_proj+down_proj"])
def test_a_tenants_dry_run_makes_the_calls_of_the_tenant(tiny, targets):
    """In steps after the first, when the tenant has learned which layers are called together."""
    with symbiosis.Executor(tiny) as executor:
        model = get_peft_model(symbiosis.connect(executor, mode="executor"), LoraConfig(r=8, target_modules=targets.split("+")))
        model.train()
        ids = torch.zeros(2, 16, dtype=torch.long)
        for _ in range(3):
            before = executor.stats()["calls"]
            model(input_ids=ids, labels=ids).loss.backward()
        calls = executor.stats()["calls"] - before
        model.symbiosis.close()
    planned = run_tenant(ModelSize.of(tiny.config), parse_tenants([f"train,lora,r=8,targets={targets},batch=2x16"])[0])
    assert planned.calls == calls
    assert planned.adapter == planned.gradients == planned.optimizer // 2 > 0


def test_activations_grow_with_the_rows_and_shrink_with_checkpointing():
    size = ModelSize.of(tiny_config(num_hidden_layers=4, vocab_size=64))
    short, long, saved = (
        run_tenant(size, parse_tenants([f"train,batch={batch}"])[0]).activations
        for batch in ("1x64", "2x128", "2x128,checkpointing")
    )
    assert 3.5 * short < long < 4.5 * short
    assert saved < 0.8 * long


def test_the_kv_cache_of_a_generating_tenant_holds_its_context():
    size = ModelSize.of(tiny_config())
    memory = run_tenant(size, parse_tenants(["generate,none,context=512"])[0])
    assert 512 <= memory.kv_cache / size.kv_cache_token() <= 512 * 9 / 8 + 16, "with room to grow"


def test_a_gpu_is_planned_without_one():
    size = ModelSize.of(tiny_config(), torch.bfloat16)
    memory = run_tenant(size, parse_tenants(["train,batch=2x64"])[0], "cuda")
    assert memory.client_part >= size.client_part
    assert memory.activations > 0
    assert run_prefill(size, 64, 4, "cuda") > 0
    parameters, activations = run_training_pass(size, parse_tenants(["job,r=8"])[0], 64, "cuda")
    assert (parameters > 0, activations > 0) == (True, True)
