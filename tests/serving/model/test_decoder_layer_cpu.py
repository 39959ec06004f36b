"""Decoder layers as one straight function: which are, and that they give what their own code gives."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from symbiosis.models.fuse_projections import join
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import install_lora_layers
from symbiosis.serving.model.decoder_layer import FusedDecoderLayer, restore
from symbiosis.serving.model.decoder_layer_cpu import straighten
from symbiosis.serving.model.paged_attention import PagedKVCache, Span, use_pages
from tests.parity.architectures import ARCHITECTURES

USUAL = {"llama", "mistral", "qwen2"}
SPANS = [Span(0, 1, 5, [0, 1]), Span(1, 3, 0, [2]), Span(4, 3, 0, [3]), Span(7, 3, 4, [4, 5])]


def served(architecture, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = architecture.model().eval().to(device, dtype)
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    memory = PagedKVCache(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        width=width,
        pages=8,
        page_size=4,
        dtype=dtype,
        device=torch.device(device),
    )
    memory._memory.normal_()
    join(model)
    use_pages(model, memory)
    bank = ActiveAdapters()
    install_lora_layers(model, bank)
    return model, memory, bank


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.name in USUAL], ids=lambda a: a.name)
@torch.inference_mode()
def test_a_straight_model_gives_what_its_own_code_gives(architecture, processor):
    model, memory, bank = served(architecture)
    ids = torch.arange(10)[None]
    places = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]])
    before = copy.deepcopy(memory._memory)
    bank.begin_batch((), ())
    memory.begin(SPANS)
    expected = model(input_ids=ids, position_ids=places, use_cache=False).logits
    stored = copy.deepcopy(memory._memory)
    straighten(model, bank)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)
    memory._memory.copy_(before)
    memory.begin(SPANS)
    torch.testing.assert_close(
        model(input_ids=ids, position_ids=places, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(memory._memory, stored, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_layer_whose_code_does_something_else_keeps_it():
    model, _, bank = served(next(a for a in ARCHITECTURES if a.name == "llama"))
    odd, plain = model.model.layers[0], model.model.layers[1]
    forward = type(odd).forward

    class Scaled(type(odd)):
        def forward(self, *given, **named):
            return forward(self, *given, **named) * 1.01

    odd.__class__ = Scaled
    straighten(model, bank)
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


def partly_turned():
    """Attention that turns a part of each head, as much as positions are wide."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = Glm4MoeConfig(**SMALL, head_dim=16, moe_intermediate_size=16, first_k_dense_replace=2, **experts)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    return Glm4MoeForCausalLM(config)


def scaled_residuals():
    """Layers that add half of what others do, and little of it."""
    config = GraniteConfig(**SMALL, residual_multiplier=0.5, attention_multiplier=0.25, initializer_range=0.006)
    return GraniteForCausalLM(config)


def linear_of_its_own_kind():
    class OwnLinear(nn.Linear):
        pass

    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OwnLinear
    return model


UNUSUAL = [partly_turned, scaled_residuals, linear_of_its_own_kind]


def logits(model, memory, bank):
    device = model.device
    bank.begin_batch((), ())
    memory.begin(SPANS)
    places = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]], device=device)
    return model(input_ids=torch.arange(10, device=device)[None], position_ids=places, use_cache=False).logits


@pytest.mark.parametrize("make", UNUSUAL)
@torch.inference_mode()
def test_what_only_looks_usual_computes_what_its_own_code_computes(make):
    model, memory, bank = served(SimpleNamespace(model=make))
    before = copy.deepcopy(memory._memory)
    expected = logits(model, memory, bank)
    straighten(model, bank)
    memory._memory.copy_(before)
    torch.testing.assert_close(logits(model, memory, bank), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_layers_can_have_their_own_code_back():
    model, _, bank = served(next(a for a in ARCHITECTURES if a.name == "llama"))
    kinds = [type(layer) for layer in model.model.layers]
    straighten(model, bank)
    assert kinds != [type(layer) for layer in model.model.layers]
    restore(model)
    assert kinds == [type(layer) for layer in model.model.layers]
