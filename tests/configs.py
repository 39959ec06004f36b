"""PEFT configs for tests."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**settings: Any) -> LoraConfig:
    """Rank 4 on the query and value projections."""
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})
