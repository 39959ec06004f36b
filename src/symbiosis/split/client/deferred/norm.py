"""A tenant's norms, as long as they are the executor's too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from symbiosis.errors import CannotSplit
from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.call_grouping import CallGroups
from symbiosis.split.client.deferred.tensor import LazyTensor, plain
from symbiosis.split.client.module_snapshot import ModuleSnapshot, is_watched
from symbiosis.split.client.shared_params import SharedParam
from symbiosis.types import LayerSpec


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A norm as the executor has it."""

    spec: LayerSpec
    groups: CallGroups
    as_made: ModuleSnapshot
    parameters: dict[str, SharedParam]

    def is_still(self, norm: nn.Module) -> bool:
        if not self.as_made.holds(norm) or len(norm._parameters) != len(self.parameters):
            return False
        return all([shared.is_still(norm._parameters.get(name)) for name, shared in self.parameters.items()])


class DeferredNorm(nn.Module):
    """Mixed into the class of a norm that the executor has too: of what comes later it gives what comes later."""

    _symbiosis_hosted: _Hosted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return super().forward(*plain(args), **plain(kwargs))
        (x,) = args
        if not isinstance(x, LazyTensor):
            return super().forward(x)
        hosted = self._symbiosis_hosted
        spec, promises, halves = hosted.spec, hosted.groups.promises, hosted.groups.halves
        if halves.can_norm(x, spec) and hosted.is_still(self) and not (is_watched(self) or self._is_trained()):
            return halves.norm(x, spec, super().forward)
        if promises.made(x) and hosted.is_still(self) and promises.can(x) and x.node.fits(1) and x.shape[-1] == spec.in_width:
            return promises.norm(spec, x)
        return super().forward(plain(x))

    def _is_trained(self) -> bool:
        return any([parameter is not None and parameter.requires_grad for parameter in self._parameters.values()])


def watch_norms(model: nn.Module, groups: CallGroups, norms: Iterable[LayerSpec]) -> None:
    """Let the norms of a model that is put together tell what they give. Raises `CannotSplit` if one is not there."""
    modules = dict(model.named_modules())
    for spec in norms:
        norm = modules.get(spec.paths[0])
        if norm is None:
            raise CannotSplit(f"the executor has a norm {spec.paths[0]}, which this model does not have")
        mix_in(norm, DeferredNorm)
        parameters = {name: SharedParam.of(parameter) for name, parameter in norm._parameters.items()}
        object.__setattr__(norm, "_symbiosis_hosted", _Hosted(spec, groups, ModuleSnapshot(norm), parameters))
