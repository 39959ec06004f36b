"""Experts of an MoE without their weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from symbiosis.errors import CannotSplit
from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.autograd import call_experts
from symbiosis.split.client.direct_mode import MappedParameter
from symbiosis.split.client.module_snapshot import ModuleSnapshot
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.virtual_layers import VirtualLayer
from symbiosis.split.client.virtual_weight import VirtualWeight
from symbiosis.types import LayerSpec


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
            self.__class__ = type(self).__bases__[1]

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
        self.__class__ = type(self).__bases__[1]  # with its own weights it is an ordinary module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare_forward()
        inputs = None if self.is_local or not self._snapshot.holds(self) else self._inputs(args, kwargs)
        if inputs is None:
            self.make_parameters(trainable=False)
            return self.forward(*args, **kwargs)
        return call_experts(self.session, self.spec, *inputs)

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """(rows, indices, weights) of a call, or None if it has another signature."""
        bound = inspect.signature(super().forward).bind(*args, **kwargs)
        values = list(bound.arguments.values())
        if len(values) != 3 or not all(isinstance(v, Tensor) and v.dim() == 2 for v in values):
            return None
        if values[1].is_floating_point() or values[0].shape[1] != self.spec.in_width:
            return None
        x, index, weight = values
        if index.shape != weight.shape or x.shape[0] != index.shape[0]:
            return None
        return x, index, weight


def make_experts(module: nn.Module, spec: LayerSpec, session: ClientSession) -> None:
    """Replace the weights by hosted ones. Raises `CannotSplit` if the executor's experts have another shape."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if own != dict(spec.weights):
        raise CannotSplit(f"the executor's {spec.paths[0]} is {dict(spec.weights)}, this model's is {own}: versions differ")
    for name in own:
        del module._parameters[name]
    mix_in(module, VirtualExperts)
    VirtualLayer._init_hosted(module, spec, session)  # type: ignore[arg-type]
    object.__setattr__(module, "_snapshot", ModuleSnapshot(module))
