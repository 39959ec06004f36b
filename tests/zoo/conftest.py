"""Small models of one family, and a zoo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from symbiosis.zoo.zoo import Zoo

CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64,
}  # fmt: skip


def make_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).eval()


def fine_tuned(model: LlamaForCausalLM, layers: range, seed: int = 1) -> LlamaForCausalLM:
    """A copy with other weights in some layers."""
    made = LlamaForCausalLM(model.config).eval()
    made.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in layers:
            for weight in made.model.layers[layer].parameters():
                weight.add_(0.01 * torch.randn_like(weight))
    return made


@pytest.fixture
def base():
    return make_model()


@pytest.fixture
def save(tmp_path):
    def save(model, name: str) -> Path:
        model.save_pretrained(tmp_path / "models" / name)
        return tmp_path / "models" / name

    return save


@pytest.fixture
def zoo(tmp_path):
    return Zoo(tmp_path / "zoo", create=True)
