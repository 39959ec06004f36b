"""PEFT configs of a plan's tenants."""

from __future__ import annotations

from typing import Any

from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from peft.utils import constants

from symbiosis.errors import SymbiosisError
from symbiosis.planning.tenants import TenantLoad

_TASK = "CAUSAL_LM"
_PROMPTS: dict[str, Any] = {"prefix": PrefixTuningConfig, "prompt": PromptTuningConfig, "ptuning": PromptEncoderConfig}


def build_adapter_config(load: TenantLoad, architecture: str) -> PeftConfig:
    """The adapter of a load, for an architecture by its `model_type`. Raises `SymbiosisError` without default targets."""
    if load.method in _PROMPTS:
        return _PROMPTS[load.method](num_virtual_tokens=load.virtual_tokens, task_type=_TASK)
    targets = None if load.targets is None else list(load.targets)
    if targets == ["all-linear"]:
        targets = "all-linear"  # type: ignore[assignment]
    if load.method == "ia3":
        known = architecture in constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
        feedforward: list[str] | None = None if targets is None else []
        _check_targets(targets, known, architecture)
        return IA3Config(target_modules=targets, feedforward_modules=feedforward, task_type=_TASK)
    _check_targets(targets, architecture in constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, architecture)
    kinds = {"use_rslora": load.method == "rslora", "use_dora": load.method == "dora"}
    return LoraConfig(r=load.rank, lora_alpha=2 * load.rank, target_modules=targets, task_type=_TASK, **kinds)


def _check_targets(targets: Any, known: bool, architecture: str) -> None:
    if targets is None and not known:
        raise SymbiosisError(f"PEFT has no default layers for {architecture}: name them, such as targets=q_proj+v_proj")
