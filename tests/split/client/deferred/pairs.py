"""Plain and connected models with the same LoRA adapter, and the places inside a layer where code may read."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import assert_same_gradients, gradients

LLAMA = ARCHITECTURES[0]
LAYERS = 2
PLACES = ["self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp", "mlp.down_proj", "input_layernorm", ""]
"""Modules of a decoder layer where hooks may read; the last is the layer itself."""
TARGETS: dict[str, list[str]] = {
    "q and v": ["q_proj", "v_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "down_proj"],
}


def with_lora(model: PreTrainedModel, targets: str = "attention", **more: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[targets], init_lora_weights=False, **more))


def layers(model: Any) -> Any:
    return model.base_model.model.model.layers


def same(both: tuple[Any, Any], passes: int = 6) -> None:
    """By default more passes than a layer is deferred in spite of reads: both modes are compared."""
    for seed in range(passes):
        assert_same_gradients(gradients(both[0], LLAMA.batch(seed)), gradients(both[1], LLAMA.batch(seed)))


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def replaced(result: Any, changed: Tensor) -> Any:
    return (changed, *result[1:]) if isinstance(result, tuple) else changed
