"""AdamW as transformers' Trainer sets it up, for the parameters of one adapter.

`Optimizer` steps parameter by parameter, `FlatOptimizer` the whole adapter at once and without a word to the host: it
is for GPUs, and the first is its reference.

N = numbers of an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from symbiosis.errors import BadCall, OutOfRange
from symbiosis.finetuning.flat_parameters import FlatGradients, FlatParameters

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that Trainer's weight decay leaves alone."""
KEPT = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter."""


_NOTHING = "a step needs gradients: call forward_backward first"


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
                raise OutOfRange(f"{name} is {value!r:.80}", field=name, expected=f"an int or float from {low:g} to {high}")


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
    def gradients(self) -> Mapping[str, Tensor]:
        """What has gathered."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    @property
    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._parameters.values())

    def step(self, settings: StepSettings) -> Tensor:
        """Change the parameters, forget the gradients, return their norm. If that is no number, nothing is changed."""
        if not self.has_gradients:
            raise BadCall(_NOTHING)
        longest = settings.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(list(self._parameters.values()), longest)
        if not math.isfinite(float(norm)):
            return norm
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


class FlatOptimizer:
    """The same over an adapter in one tensor. A gradient that is missing counts as 0."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._gradients_N: Tensor | None = None
        self._kept: dict[str, Tensor] = {}
        """By what AdamW keeps; empty before the first step."""
        self._runs: list[tuple[int, int, bool]] = []
        """Parameters that lie together: where they begin and end, and whether they decay."""
        for name, place in flat.slices.items():
            decays = not _NO_DECAY.search(name.lower())
            if self._runs and self._runs[-1][2] == decays:
                self._runs[-1] = (self._runs[-1][0], place.end, decays)
            else:
                self._runs.append((place.start, place.end, decays))

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        assert isinstance(gradients, FlatGradients)
        if self._gradients_N is None:
            self._gradients_N = gradients.gradients_N
        else:
            self._gradients_N += gradients.gradients_N

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """What has gathered."""
        return {} if self._gradients_N is None else FlatGradients(self._flat, self._gradients_N)

    @property
    def has_gradients(self) -> bool:
        return self._gradients_N is not None

    @torch.no_grad()
    def step(self, settings: StepSettings) -> Tensor:
        """As `Optimizer.step`; the norm is on its way, and the device sees for itself whether it is a number."""
        gradients_N = self._gradients_N
        if gradients_N is None:
            raise BadCall(_NOTHING)
        values_N = self._flat.values_N
        if not self._kept:
            self._kept = {kept: torch.zeros_like(values_N) for kept in KEPT[:2]} | {"step": values_N.new_zeros(())}
        norm: Tensor = torch.linalg.vector_norm(gradients_N)
        failed = torch.isfinite(norm).logical_not().to(norm.dtype)
        # what gradients are divided by, as in clip_grad_norm_
        divisor = ((norm + 1e-6) / settings.max_grad_norm).clamp(min=1.0) if settings.max_grad_norm else None
        step = self._kept["step"].add_(1 - failed)
        for start, end, decays in self._runs:
            torch._fused_adamw_(
                [values_N[start:end]],
                [gradients_N[start:end]],
                [self._kept["exp_avg"][start:end]],
                [self._kept["exp_avg_sq"][start:end]],
                [],
                [step],
                lr=settings.learning_rate,
                beta1=settings.adam_beta1,
                beta2=settings.adam_beta2,
                weight_decay=settings.weight_decay if decays else 0.0,
                eps=settings.adam_epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=failed,
            )
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        self._gradients_N = None

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU, by parameter and what it is."""
        found: dict[str, Tensor] = {}
        for kept, flat in self._kept.items():
            whole = flat.to("cpu", copy=True)
            for name in self._flat.slices:
                found[f"{name}/{kept}"] = whole.clone() if kept == "step" else self._flat.view_of(whole, name).clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave, checked by the caller; nothing for a fresh start."""
        self.clear()
        self._kept = {}
        if not state:
            return
        whole = {kept: torch.zeros_like(self._flat.values_N) for kept in KEPT[:2]}
        for name in self._flat.slices:
            for kept, flat in whole.items():
                if f"{name}/{kept}" in state:
                    self._flat.view_of(flat, name).copy_(state[f"{name}/{kept}"])
        steps = [float(state[f"{name}/step"]) for name in self._flat.slices if f"{name}/step" in state]
        self._kept = {**whole, "step": self._flat.values_N.new_tensor(max(steps, default=0.0))}


AnyOptimizer: TypeAlias = Optimizer | FlatOptimizer


def optimizer_of(parameters: Mapping[str, nn.Parameter], flat: FlatParameters | None) -> AnyOptimizer:
    return Optimizer(parameters) if flat is None else FlatOptimizer(flat)
