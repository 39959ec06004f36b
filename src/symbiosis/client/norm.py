"""A tenant's norms, as long as they are the executor's too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from symbiosis.client.as_made import AsMade
from symbiosis.client.groups import Groups
from symbiosis.client.mixing import mix_in
from symbiosis.client.promise import Promise, plain
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
        return all([shared.is_still(norm._parameters.get(name)) for name, shared in self.parameters.items()])


class WatchedNorm(nn.Module):
    """Mixed into the class of a norm that the executor has too: of a promise it gives a promise."""

    _symbiosis_hosted: _Hosted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is not Promise:
            return super().forward(args[0])
        hosted = self._symbiosis_hosted
        promises = hosted.groups.promises
        if len(args) == 1 and not kwargs and promises.made(args[0]) and hosted.is_still(self):
            (x,) = args
            if promises.can(x) and x.node.fits(1) and x.shape[-1] == hosted.spec.in_width:
                return promises.norm(hosted.spec, x)
        return super().forward(*plain(args), **plain(kwargs))


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
