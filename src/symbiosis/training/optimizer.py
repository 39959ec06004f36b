"""AdamW as transformers' Trainer sets it up, for the parameters of one adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import BadCall, Diverged, OutOfRange

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that Trainer's weight decay leaves alone."""
KEPT = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """One step's settings, by Trainer's names and defaults. All are checked."""

    learning_rate: float = 5e-5
    max_grad_norm: float = 1.0
    """Longer gradients are shortened to this; 0 for never."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        ranges = {
            "learning_rate": (0.0, 1e30),
            "max_grad_norm": (0.0, 1e9),
            "weight_decay": (0.0, 1e3),
            "adam_beta1": (0.0, 0.9999999),
            "adam_beta2": (0.0, 0.9999999),
            "adam_epsilon": (0.0, 1.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected=f"{low} to {high}")


class Optimizer:
    """Owns the state of AdamW; gradients lie at the parameters themselves."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        decaying = [p for name, p in parameters.items() if not _NO_DECAY.search(name.lower())]
        others = [p for name, p in parameters.items() if _NO_DECAY.search(name.lower())]
        self._adamw = torch.optim.AdamW([{"params": decaying}, {"params": others}], lr=0.0, weight_decay=0.0, fused=True)

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._parameters.values())

    def step(self, settings: StepSettings) -> float:
        """Change the parameters, forget the gradients, return their norm. Raises `Diverged` if that is no number."""
        if not self.has_gradients:
            raise BadCall("a step needs gradients: call forward_backward first")
        longest = settings.max_grad_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(list(self._parameters.values()), longest))
        if not math.isfinite(norm):
            raise Diverged(f"the gradient's norm is {norm}; a smaller learning rate or clipping may help")
        for group, decay in zip(self._adamw.param_groups, (settings.weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = settings.learning_rate, decay
            group["betas"], group["eps"] = (settings.adam_beta1, settings.adam_beta2), settings.adam_epsilon
        self._adamw.step()
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU, by parameter and what it is."""
        return {
            f"{name}/{kept}": self._adamw.state[p][kept].detach().to("cpu", copy=True)
            for name, p in self._parameters.items()
            for kept in KEPT
            if p in self._adamw.state
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave, checked by the caller; nothing for a fresh start."""
        self.clear()
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}/step" in state:
                entry: dict[str, Any] = {}
                for kept in KEPT:
                    dtype = torch.float32 if kept == "step" else parameter.dtype
                    entry[kept] = state[f"{name}/{kept}"].to(parameter.device, dtype, copy=True)
                self._adamw.state[parameter] = entry
