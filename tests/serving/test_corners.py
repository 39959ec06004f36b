"""Corner cases of architectures and adapters: biases, scaled embeddings, windows, long positions, NaN."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from symbiosis.errors import CannotServe
from symbiosis.kernels.tiles import Span
from symbiosis.serving.engine import Engine
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.scheduling.sequence import Sampling
from tests.serving.test_engine import greedy

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
SAMPLING = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


def shaken(model, size=0.3):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))
    return model.eval()


def with_biases():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    return shaken(model, 0.1)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BIASES = {
    "trained bias": LoraConfig(r=3, target_modules=ALL, bias="lora_only", init_lora_weights=False),
    "a bias of its own": LoraConfig(r=3, target_modules=ALL, lora_bias=True, init_lora_weights=False),
    "DoRA and a trained bias": LoraConfig(
        r=3, target_modules=["q_proj", "v_proj", "up_proj"], use_dora=True, bias="lora_only", init_lora_weights=False
    ),
    "DoRA over a bias": LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False),
}


@pytest.mark.parametrize("kind", BIASES)
def test_biases_of_layers_and_of_adapters(kind, tmp_path):
    base = with_biases()
    model = shaken(get_peft_model(copy.deepcopy(base), copy.deepcopy(BIASES[kind])))
    model.save_pretrained(tmp_path / "a")
    engine = Engine(copy.deepcopy(base), pages=64, page_size=4)
    engine.add_adapter("a", tmp_path / "a")
    prompts = [[5, 6, 7], list(range(1, 12))]
    completions = engine.generate([*prompts, [4, 4]], ["a", "a", None], SAMPLING)
    for prompt, completion in zip(prompts, completions, strict=False):
        assert completion.tokens == greedy(model, prompt, 8)
    assert completions[2].tokens == greedy(base, [4, 4], 8)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 9, 11]}},
    ],
    ids=["own", "low-rank", "tokens"],
)
def test_embeddings_that_scale_their_rows_scale_an_adapters_too(config, tmp_path):
    torch.manual_seed(0)
    base = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8, tie_word_embeddings=False)).eval()
    model = shaken(get_peft_model(copy.deepcopy(base), LoraConfig(r=2, init_lora_weights=False, **config)))
    model.save_pretrained(tmp_path / "a")
    engine = Engine(copy.deepcopy(base), pages=64, page_size=4)
    engine.add_adapter("a", tmp_path / "a")
    completions = engine.generate([[5, 9, 20, 11], [5, 9]], ["a", None], SAMPLING)
    assert completions[0].tokens == greedy(model, [5, 9, 20, 11], 8)
    assert completions[1].tokens == greedy(base, [5, 9], 8)


def test_a_window_that_is_only_in_the_mask_is_rejected():
    window = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **window, **experts))
    with pytest.raises(CannotServe, match="window"):
        EngineCore(model.eval(), pages=16, page_size=4)


def test_positions_that_would_change_the_embedding_of_all_are_not_reached():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 32}
    config = Phi3Config(**SIZES, **lengths, rope_parameters=rope, tie_word_embeddings=False)
    core = EngineCore(Phi3ForCausalLM(config).eval(), pages=64, page_size=4)
    assert core.scheduler.config.max_length == 32


def test_nan_in_another_sequences_block_has_no_effect():
    kv_cache = PagedKVCache(
        layers=1, heads=1, width=8, num_blocks=8, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    found = []
    for poison in (0.0, float("nan"), float("inf")):
        torch.manual_seed(1)
        kv_cache._memory.normal_()
        kv_cache._memory[:, :, :4] = poison  # block 0 belongs to another sequence
        kv_cache._memory[:, :, 6:8] = poison  # after the end of the sequence in block 1
        kv_cache.begin([Span(0, 1, 1, [1]), Span(1, 1, 9, [2, 3, 4])])
        q, k, v = (torch.randn(1, 2, 8) for _ in range(3))
        found.append(kv_cache.attend(0, q, k, v, scale=1.0, window=None, cap=None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_model_has_one_engine():
    model = with_biases()
    Engine(model, pages=16, page_size=4)
    with pytest.raises(CannotServe, match="already"):
        Engine(model, pages=16, page_size=4)
