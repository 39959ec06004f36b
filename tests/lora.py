"""LoRA configs and adapted models, the same for all tests."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model


def lora_config(targets: tuple[str, ...] | str = ("q_proj", "v_proj"), **settings: Any) -> LoraConfig:
    """Rank 4 and random factors, so that the adapter changes the model from the start."""
    target_modules = list(targets) if isinstance(targets, tuple) else targets
    return LoraConfig(**{"r": 4, "init_lora_weights": False, **settings}, target_modules=target_modules)


def with_lora(
    model: Any, targets: tuple[str, ...] | str = ("q_proj", "v_proj"), *, seed: int = 1, **settings: Any
) -> PeftModel:
    """The model with a LoRA adapter whose factors depend on the seed alone."""
    torch.manual_seed(seed)
    return get_peft_model(model, lora_config(targets, **settings))
