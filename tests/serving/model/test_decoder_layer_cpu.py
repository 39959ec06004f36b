"""Fused decoder layers for CPUs: which layers are fused, and that they match their own code."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import install_lora_layers
from symbiosis.serving.model.decoder_layer import FusedDecoderLayer, unfuse_layers
from symbiosis.serving.model.decoder_layer_cpu import fuse_layers_cpu
from symbiosis.serving.model.paged_attention import PagedKVCache, Span, use_paged_attention
from tests.parity.architectures import ARCHITECTURES

FUSABLE = {"llama", "mistral", "qwen2"}
SPANS = [Span(0, 1, 5, [0, 1]), Span(1, 3, 0, [2]), Span(4, 3, 0, [3]), Span(7, 3, 4, [4, 5])]


def served(architecture, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = architecture.model().eval().to(device, dtype)
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_cache = PagedKVCache(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        width=width,
        num_blocks=8,
        block_size=4,
        dtype=dtype,
        device=torch.device(device),
    )
    kv_cache._memory.normal_()
    fuse_projections(model)
    use_paged_attention(model, kv_cache)
    adapters = ActiveAdapters()
    install_lora_layers(model, adapters)
    return model, kv_cache, adapters


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.name in FUSABLE], ids=lambda a: a.name)
@torch.inference_mode()
def test_a_fused_model_matches_its_own_code(architecture, processor):
    model, kv_cache, adapters = served(architecture)
    ids = torch.arange(10)[None]
    positions = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]])
    before = copy.deepcopy(kv_cache._memory)
    adapters.begin_batch((), ())
    kv_cache.begin(SPANS)
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    stored = copy.deepcopy(kv_cache._memory)
    fuse_layers_cpu(model, adapters)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)
    kv_cache._memory.copy_(before)
    kv_cache.begin(SPANS)
    torch.testing.assert_close(
        model(input_ids=ids, position_ids=positions, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(kv_cache._memory, stored, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_layer_with_other_code_is_not_fused():
    model, _, adapters = served(next(a for a in ARCHITECTURES if a.name == "llama"))
    odd, plain = model.model.layers[0], model.model.layers[1]
    forward = type(odd).forward

    class Scaled(type(odd)):
        def forward(self, *given, **named):
            return forward(self, *given, **named) * 1.01

    odd.__class__ = Scaled
    fuse_layers_cpu(model, adapters)
    assert not isinstance(odd, FusedDecoderLayer)
    assert isinstance(plain, FusedDecoderLayer)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def partial_rotary():
    """Attention that rotates a part of each head, as wide as its embeddings."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = Glm4MoeConfig(**SMALL, head_dim=16, moe_intermediate_size=16, first_k_dense_replace=2, **experts)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    return Glm4MoeForCausalLM(config)


def scaled_residuals():
    """Layers that scale what they add to the residual."""
    config = GraniteConfig(**SMALL, residual_multiplier=0.5, attention_multiplier=0.25, initializer_range=0.006)
    return GraniteForCausalLM(config)


def linear_subclass():
    class OwnLinear(nn.Linear):
        pass

    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OwnLinear
    return model


LOOKALIKES = [partial_rotary, scaled_residuals, linear_subclass]


def logits(model, kv_cache, adapters):
    device = model.device
    adapters.begin_batch((), ())
    kv_cache.begin(SPANS)
    positions = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]], device=device)
    return model(input_ids=torch.arange(10, device=device)[None], position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("make", LOOKALIKES)
@torch.inference_mode()
def test_a_layer_that_only_looks_common_matches_its_own_code(make):
    model, kv_cache, adapters = served(SimpleNamespace(model=make))
    before = copy.deepcopy(kv_cache._memory)
    expected = logits(model, kv_cache, adapters)
    fuse_layers_cpu(model, adapters)
    kv_cache._memory.copy_(before)
    torch.testing.assert_close(logits(model, kv_cache, adapters), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_layers_can_be_unfused():
    model, _, adapters = served(next(a for a in ARCHITECTURES if a.name == "llama"))
    kinds = [type(layer) for layer in model.model.layers]
    fuse_layers_cpu(model, adapters)
    assert kinds != [type(layer) for layer in model.model.layers]
    unfuse_layers(model)
    assert kinds == [type(layer) for layer in model.model.layers]
