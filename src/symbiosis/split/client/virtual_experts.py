"""Experts of an MoE without their weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import CannotSplit
from symbiosis.models.expert_groups import choices_of_groups
from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.autograd import call_experts
from symbiosis.split.client.direct_mode import MappedParameter
from symbiosis.split.client.module_snapshot import ModuleSnapshot
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.virtual_layers import VirtualLayer
from symbiosis.split.client.virtual_weight import VirtualWeight
from symbiosis.types import ExpertCall, LayerSpec


class _ChildOfExperts(nn.Module):
    """Mixed into the class of a module inside of experts that had their weights."""

    experts: VirtualExperts

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            experts = self.__dict__.get("experts")
            if not isinstance(experts, VirtualExperts) or not any(each.endswith(f".{name}") for each in experts._hosted):
                raise
            experts.make_parameters(trainable=False)  # PEFT's target_parameters needs real ones
            return self._parameters[name]


class VirtualExperts(VirtualLayer):
    """Mixed into the class of an MoE's experts. The router belongs to the tenant."""

    _snapshot: ModuleSnapshot

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_hosted", ()) and self._parameters.get(name) is None:
            # PEFT's target_parameters registers parametrizations on stacked weights: these must be real.
            self.make_parameters(trainable=False)
            return self._parameters[name]
        return super().__getattr__(name)

    def map_weights(self, weights: dict[str, Tensor]) -> None:
        super().map_weights(weights)
        if weights:
            self._parameters.update({name: MappedParameter.over(weight) for name, weight in weights.items()})
            self._parameters.pop("like", None)
            self._become_plain()

    def _become_plain(self) -> None:
        """With weights of its own it is an ordinary module."""
        self.__class__ = type(self).__bases__[1]
        for name in [name for name in self._parameters if "." in name]:
            path, _, own = name.rpartition(".")
            child = nn.Module.get_submodule(self, path)
            child._parameters[own] = self._parameters.pop(name)
            if isinstance(child, _ChildOfExperts):
                child.__class__ = type(child).__bases__[1]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name, _ in self.spec.weights:
            weight: Any = self._parameters.get(name)  # the caller may have made all of them real meanwhile
            weight = VirtualWeight(self, name, alias=False) if weight is None else weight
            yield f"{prefix}.{name}" if prefix else name, weight

    def make_parameters(self, *, trainable: bool) -> None:
        super().make_parameters(trainable=trainable)
        self._become_plain()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare_forward()
        values = list(inspect.signature(super().forward).bind(*args, **kwargs).arguments.values())
        is_hosted = not self.is_local and self._snapshot.holds(self)
        inputs = self._inputs(values) if is_hosted else None
        if inputs is None:
            self.make_parameters(trainable=False)
            return self.forward(*args, **kwargs)
        if self.spec.expert_call is ExpertCall.SEQUENCES:
            return call_experts(self.session, self.spec, *inputs).view_as(values[0])
        if self.spec.expert_call is not ExpertCall.EQUAL_GROUPS:
            return call_experts(self.session, self.spec, *inputs)
        x, index, weight = inputs
        chosen = x.any(dim=1).nonzero()[:, 0]  # the others give zeros
        found = call_experts(self.session, self.spec, x[chosen], index[chosen], weight[chosen])
        return found.new_zeros(x.shape[0], self.spec.out_width).index_copy(0, chosen, found)

    def _inputs(self, values: list[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
        """(rows, indices, weights) of a call, or None if it has another signature."""
        if self.spec.expert_call in (ExpertCall.EQUAL_GROUPS, ExpertCall.SIZED_GROUPS):
            return self._inputs_of_groups(*values)
        if self.spec.expert_call is ExpertCall.SEQUENCES and isinstance(values[0], Tensor) and values[0].dim() == 3:
            values = [values[0].flatten(0, 1), *values[1:]]
        if len(values) != 3 or not all(isinstance(v, Tensor) and v.dim() == 2 for v in values):
            return None
        if values[1].is_floating_point() or values[0].shape[1] != self.spec.in_width:
            return None
        x, index, weight = values
        if index.shape != weight.shape or x.shape[0] != index.shape[0]:
            return None
        return x, index, weight

    def _inputs_of_groups(self, x: Any, sizes: Any = None, *others: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        is_equal = self.spec.expert_call is ExpertCall.EQUAL_GROUPS
        if others or is_equal != (sizes is None) or not isinstance(x, Tensor) or x.dim() != 2:
            return None
        if x.shape[1] != self.spec.in_width or (is_equal and x.shape[0] % self.spec.experts):
            return None
        index = choices_of_groups(self.spec.experts, sizes, x.shape[0], x.device)
        return (x, index, torch.ones_like(index, dtype=x.dtype)) if len(index) == len(x) else None


def make_experts(module: nn.Module, spec: LayerSpec, session: ClientSession) -> None:
    """Replace the weights by hosted ones. Raises `CannotSplit` if the executor's experts have another shape."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if own != dict(spec.weights):
        raise CannotSplit(f"the executor's {spec.paths[0]} is {dict(spec.weights)}, this model's is {own}: versions differ")
    for name in own:
        path, _, leaf = name.rpartition(".")
        child = module.get_submodule(path)
        del child._parameters[leaf]
        if path and not isinstance(child, _ChildOfExperts):
            mix_in(child, _ChildOfExperts, experts=module)
    mix_in(module, VirtualExperts)
    VirtualLayer._init_hosted(module, spec, session)  # type: ignore[arg-type]
    object.__setattr__(module, "_snapshot", ModuleSnapshot(module))
