"""AdamW as transformers' Trainer configures it, for the parameters of one adapter.

`Optimizer` steps parameter by parameter. `FlatOptimizer` steps the whole adapter at once without waiting for the device:
it is for GPUs, and `Optimizer` is its reference.

N = numbers of an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from symbiosis.errors import BadCall, OutOfRange
from symbiosis.finetuning.adapters.flat_parameters import FlatGradients, FlatParameters

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters without weight decay in Trainer."""
STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter."""
_NO_GRADIENTS = "a step needs gradients: call forward_backward first"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Settings of one optimizer step, with Trainer's names and defaults. Raises `OutOfRange`."""

    learning_rate: float = 5e-5
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 for never."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        highest = {"learning_rate": 1e30, "max_grad_norm": 1e9, "weight_decay": 1e3, "adam_epsilon": 1.0}
        highest |= {"adam_beta1": 0.9999999, "adam_beta2": 0.9999999}
        for name, high in highest.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
                raise OutOfRange(f"{name} is {value!r:.80}", field=name, expected=f"an int or float from 0 to {high}")


class Optimizer:
    """Owns the state of AdamW; gradients are stored in the parameters' `grad`."""

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
        """Accumulated since the last step."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def tensors(self) -> list[Tensor]:
        """Gradients and state. Callable from any thread."""
        states = [tensor for state in list(self._adamw.state.values()) for tensor in list(state.values())]
        return [*self.gradients.values(), *states]

    def step(self, settings: StepSettings) -> Tensor:
        """Update the parameters, clear the gradients, return their norm. A norm that is not finite changes nothing."""
        if not self.gradients:
            raise BadCall(_NO_GRADIENTS)
        norm = nn.utils.clip_grad_norm_(list(self._parameters.values()), settings.max_grad_norm or math.inf)
        if not math.isfinite(float(norm)):
            return norm
        for group, decay in zip(self._adamw.param_groups, (settings.weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = settings.learning_rate, decay
            group["betas"], group["eps"] = (settings.adam_beta1, settings.adam_beta2), settings.adam_epsilon
        self._adamw.step()
        self.clear()
        return norm

    def clear(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU, named `parameter/kind`."""
        return {
            f"{name}/{kind}": self._adamw.state[p][kind].detach().to("cpu", copy=True)
            for name, p in self._parameters.items()
            for kind in STATE_NAMES
            if p in self._adamw.state
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set what `state` returned, checked by the caller; empty for a fresh start."""
        self.clear()
        self._adamw.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}/step" in state:
                dtypes = dict.fromkeys(STATE_NAMES, parameter.dtype) | {"step": torch.float32}
                self._adamw.state[parameter] = {
                    kind: state[f"{name}/{kind}"].to(parameter.device, dtype, copy=True) for kind, dtype in dtypes.items()
                }


class FlatOptimizer:
    """The same for an adapter in one tensor. A missing gradient counts as 0."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._gradients_N: Tensor | None = None
        self._state: dict[str, Tensor] = {}  # by `STATE_NAMES`; empty before the first step
        self._runs: list[tuple[int, int, bool]] = []  # contiguous parameters: start, end, and whether they decay
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
        """Accumulated since the last step."""
        return {} if self._gradients_N is None else FlatGradients(self._flat, self._gradients_N)

    def tensors(self) -> list[Tensor]:
        """Gradients and state. Callable from any thread."""
        gradients_N = self._gradients_N
        return [*([] if gradients_N is None else [gradients_N]), *self._state.values()]

    @torch.no_grad()
    def step(self, settings: StepSettings) -> Tensor:
        """As `Optimizer.step`, but asynchronous: the device itself checks whether the norm is finite."""
        gradients_N = self._gradients_N
        if gradients_N is None:
            raise BadCall(_NO_GRADIENTS)
        values_N = self._flat.values_N
        if not self._state:
            self._state = {kind: torch.zeros_like(values_N) for kind in STATE_NAMES[:2]} | {"step": values_N.new_zeros(())}
        norm: Tensor = torch.linalg.vector_norm(gradients_N)
        failed = torch.isfinite(norm).logical_not().to(norm.dtype)
        # the divisor of the gradients, as in clip_grad_norm_
        divisor = ((norm + 1e-6) / settings.max_grad_norm).clamp(min=1.0) if settings.max_grad_norm else None
        step = self._state["step"].add_(1 - failed)
        for start, end, decays in self._runs:
            torch._fused_adamw_(
                [values_N[start:end]],
                [gradients_N[start:end]],
                [self._state["exp_avg"][start:end]],
                [self._state["exp_avg_sq"][start:end]],
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
        """Drop the gradients."""
        self._gradients_N = None

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU, named `parameter/kind`."""
        found: dict[str, Tensor] = {}
        for kind, flat in self._state.items():
            on_cpu = flat.to("cpu", copy=True)
            for name in self._flat.slices:
                found[f"{name}/{kind}"] = on_cpu.clone() if kind == "step" else self._flat.view_of(on_cpu, name).clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set what `state` returned, checked by the caller; empty for a fresh start."""
        self.clear()
        self._state = {}
        if not state:
            return
        moments = {kind: torch.zeros_like(self._flat.values_N) for kind in STATE_NAMES[:2]}
        for name in self._flat.slices:
            for kind, flat in moments.items():
                if f"{name}/{kind}" in state:
                    self._flat.view_of(flat, name).copy_(state[f"{name}/{kind}"])
        steps = [float(state[f"{name}/step"]) for name in self._flat.slices if f"{name}/step" in state]
        self._state = {**moments, "step": self._flat.values_N.new_tensor(max(steps, default=0.0))}


AnyOptimizer: TypeAlias = Optimizer | FlatOptimizer


def create_optimizer(parameters: Mapping[str, nn.Parameter], flat: FlatParameters | None) -> AnyOptimizer:
    return Optimizer(parameters) if flat is None else FlatOptimizer(flat)
