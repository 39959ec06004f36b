from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_memory_of_the_gpu_adds_up_by_owner():
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    with symbiosis.Executor(LlamaForCausalLM(config), device="cuda") as executor:
        stats = executor.stats()
        assert stats["device"] == "cuda:0"
        for device in ("cuda:0", "cpu"):
            memory = dict(stats["memory"][device])
            assert memory.pop("total") == sum(memory.values()) > 0
        assert stats["bytes_held"] <= stats["memory"]["cuda:0"]["base_weights"] <= torch.cuda.memory_reserved()
