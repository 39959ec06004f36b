"""Tenant and executor on different devices, and a KV cache in host memory: prefill on the GPU, decode on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import symbiosis
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.split.client.long_context import generation, host_cache
from symbiosis.split.client.long_context.host_cache import HostKVCache
from tests.conftest import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}


def make(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(hidden_size=128)).to(dtype).eval().requires_grad_(False)


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(host_cache, "SEGMENT_TOKENS", 16)


@pytest.mark.parametrize(("tenant", "executor"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tenant_and_executor_on_different_devices(tenant, executor, dtype):
    plain = make(torch.float32)
    ids = torch.randint(1, 128, (2, 20))
    with symbiosis.Executor(copy.deepcopy(plain), device=executor) as served:
        model = symbiosis.connect(served, device=tenant, dtype=dtype, mode="executor")
        found = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))(input_ids=ids.to(tenant)).logits
        assert (found.device.type, found.dtype) == (tenant, dtype)
        torch.testing.assert_close(found.float().cpu(), plain(ids).logits, rtol=0, atol=1e-2 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("mode", ["direct", "executor"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("adapter", [False, True])
def test_prefill_on_the_gpu_and_decode_on_the_cpu(mode, kv_dtype, adapter, small_segments):
    prompt = torch.randint(1, 128, (2, 70), device="cuda")
    mask = torch.ones_like(prompt)
    mask[0, :11] = 0
    with symbiosis.Executor(make(), device="cuda") as served:
        model = base = symbiosis.connect(served, device="cuda", mode=mode)
        if adapter:
            torch.manual_seed(1)
            lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
            model = get_peft_model(base, lora).eval()
        before = {name: (id(p), p.device) for name, p in model.named_parameters()}
        expected = model.generate(input_ids=prompt, attention_mask=mask, kv="device", **OPTIONS)
        host = {"kv": "host", "kv_dtype": kv_dtype, "kv_chunk_tokens": 13}
        found = model.generate(input_ids=prompt, attention_mask=mask, **host, **OPTIONS)
        assert found.sequences.device.type == "cuda"
        cache = found.past_key_values
        assert isinstance(cache, HostKVCache)
        assert cache.layers[0].keys.device.type == "cpu"
        assert cache.layers[0].keys.is_pinned()
        assert {name: (id(p), p.device) for name, p in model.named_parameters()} == before
        for ours, theirs in list(zip(found.logits, expected.logits, strict=True))[:2]:
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0.1)
        again = model.generate(input_ids=prompt, attention_mask=mask, kv="device", **OPTIONS)
        assert torch.equal(again.sequences, expected.sequences)


def test_memory_on_the_gpu_does_not_grow_with_the_context():
    peaks = []
    with symbiosis.Executor(make(), device="cuda") as served:
        model = symbiosis.connect(served, device="cuda")
        for tokens in (2048, 16384, 16384, 65536):
            prompt = torch.randint(1, 128, (1, tokens), device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), kv="host", **{**OPTIONS, "max_new_tokens": 3}
            )
            peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[3] < 1.5 * peaks[2]


def test_auto_judges_by_the_free_memory():
    free, _ = torch.cuda.mem_get_info()
    device = torch.device("cuda", 0)
    assert generation.would_not_fit(generation.CacheSize(1, 1, 2 * free), device)
    assert not generation.would_not_fit(generation.CacheSize(1, 1, free // 4), device)


def test_the_engine_restores_blocks_from_page_locked_memory():
    model = make(torch.float32)
    prompts = [[(7 * number + token) % 128 for token in range(60)] for number in range(6)]
    sampling = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for pages, host_bytes in ((256, 0), (24, 1 << 24)):
        core = EngineCore(copy.deepcopy(model).to("cuda"), pages=pages, host_cache_bytes=host_bytes)
        core.host_tier.copy_s = 0.0
        sequences = [core.add(prompt, sampling) for prompt in prompts]
        while not core.is_idle():
            core.step()
            core.scheduler.check_integrity()
        found.append([sequence.outputs for sequence in sequences])
    assert core.scheduler.block_manager.host.num_restored > 0
    assert found[0] == found[1]
