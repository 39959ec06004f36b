"""A tenant's norms, as long as they are the executor's too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.as_made import AsMade
from symbiosis.client.groups import Groups
from symbiosis.client.mixing import mix_in
from symbiosis.client.shared import Shared
from symbiosis.errors import CannotSplit
from symbiosis.types import LayerSpec


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A norm as the executor has it."""

    spec: LayerSpec
    groups: Groups
    as_made: AsMade
    parameters: dict[str, Shared]

    def is_still(self, norm: nn.Module) -> bool:
        if not self.as_made.holds(norm) or len(norm._parameters) != len(self.parameters):
            return False
        return all(shared.is_still(norm._parameters.get(name)) for name, shared in self.parameters.items())


class WatchedNorm(nn.Module):
    """Mixed into the class of a norm that the executor has too: what it gives may lead onward (`onward`)."""

    _symbiosis_hosted: _Hosted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = super().forward(*args, **kwargs)
        if torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return rows
        (x,), hosted = args, self._symbiosis_hosted
        if not isinstance(x, Tensor) or x.is_inference() or not hosted.groups.onward.is_way(x) or rows.dtype is not x.dtype:
            return rows
        return hosted.groups.normed(hosted.spec, x, rows, is_shared=hosted.is_still(self))


def watch_norms(model: nn.Module, groups: Groups, norms: Iterable[LayerSpec]) -> None:
    """Let the norms of a model that is put together tell what they give. Raises `CannotSplit` if one is not there."""
    modules = dict(model.named_modules())
    for spec in norms:
        norm = modules.get(spec.paths[0])
        if norm is None:
            raise CannotSplit(f"the executor has a norm {spec.paths[0]}, which this model does not have")
        mix_in(norm, WatchedNorm)
        parameters = {name: Shared.of(parameter) for name, parameter in norm._parameters.items()}
        object.__setattr__(norm, "_symbiosis_hosted", _Hosted(spec, groups, AsMade(norm), parameters))
    groups.onward.know(model)
