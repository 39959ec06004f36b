"""LoRA configs and adapted models, the same for all tests."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**settings: Any) -> LoraConfig:
    """Rank 4 on the query and value projections."""
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def random_lora(targets: tuple[str, ...] | str = ("q_proj", "v_proj"), **settings: Any) -> LoraConfig:
    """With random factors, so that the adapter changes the model from the start."""
    target_modules = list(targets) if isinstance(targets, tuple) else targets
    return lora(**{"target_modules": target_modules, "init_lora_weights": False, **settings})


def with_random_lora(
    model: Any, targets: tuple[str, ...] | str = ("q_proj", "v_proj"), *, seed: int = 1, **settings: Any
) -> PeftModel:
    """The model with a LoRA adapter whose factors depend on the seed alone."""
    torch.manual_seed(seed)
    return get_peft_model(model, random_lora(targets, **settings))
