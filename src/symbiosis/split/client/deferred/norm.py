"""Norms of a tenant that are deferred while the executor's norm computes the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from symbiosis.errors import CannotSplit
from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.deferred.tensor import DeferredTensor, compute_outputs, is_pending, plain
from symbiosis.split.client.module_snapshot import ModuleSnapshot, is_watched
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.shared_params import SharedParam
from symbiosis.types import LayerKind, LayerSpec


@dataclass(frozen=True, slots=True)
class _HostedNorm:
    """A norm as the executor has it."""

    spec: LayerSpec
    session: ClientSession
    snapshot: ModuleSnapshot
    parameters: dict[str, SharedParam]

    def is_unchanged(self, norm: nn.Module) -> bool:
        if not self.snapshot.holds(norm) or len(norm._parameters) != len(self.parameters):
            return False
        return all([shared.is_unchanged(norm._parameters.get(name)) for name, shared in self.parameters.items()])


class DeferredNorm(nn.Module):
    """Mixed into the class of a norm that the executor has too: of a deferred tensor it returns a deferred tensor."""

    _symbiosis_hosted: _HostedNorm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return super().forward(*plain(args), **plain(kwargs))
        (x,) = args
        if not isinstance(x, DeferredTensor):
            return super().forward(x)
        hosted, node = self._symbiosis_hosted, x.node
        deferral, spec = node.deferral, hosted.spec
        if not is_pending(x) or deferral.session is not hosted.session or node.shape[-1] != spec.in_width:
            return super().forward(plain(x))
        if not (deferral.can_defer(x) and node.fits(1) and hosted.is_unchanged(self)):
            return super().forward(plain(x))
        if deferral.has_history and (is_watched(self) or self._is_trained()):
            return super().forward(plain(x))
        made = type(node)(deferral, spec, node, spec.out_width)
        if deferral.has_history:
            made.norm_forward = super().forward
        return type(x)(made)

    def follow_parameters(self) -> None:
        """Record the current parameters as the executor's: they are copies of those recorded before."""
        hosted = self._symbiosis_hosted
        parameters = {name: SharedParam.of(parameter) for name, parameter in self._parameters.items()}
        object.__setattr__(self, "_symbiosis_hosted", replace(hosted, parameters=parameters))

    def is_hosted(self) -> bool:
        """Whether the executor's norm computes the same."""
        return self._symbiosis_hosted.is_unchanged(self)

    def _is_trained(self) -> bool:
        return any([parameter is not None and parameter.requires_grad for parameter in self._parameters.values()])


def enable_deferral(model: nn.Module, session: ClientSession) -> None:
    """Let layers of this model return deferred tensors to each other, and computed ones to its caller."""
    if any(isinstance(module, DeferredNorm) for module in model.modules()):
        return
    defer_norms(model, session, (spec for spec in session.manifest.layers if spec.kind is LayerKind.NORM))
    compute_outputs(model)


def defer_norms(model: nn.Module, session: ClientSession, norms: Iterable[LayerSpec]) -> None:
    """Make these norms of an assembled model deferrable. Raises `CannotSplit` if the model lacks one."""
    modules = dict(model.named_modules())
    for spec in norms:
        norm = modules.get(spec.paths[0])
        if norm is None:
            raise CannotSplit(f"the executor has a norm {spec.paths[0]}, which this model does not have")
        mix_in(norm, DeferredNorm)
        parameters = {name: SharedParam.of(parameter) for name, parameter in norm._parameters.items()}
        object.__setattr__(norm, "_symbiosis_hosted", _HostedNorm(spec, session, ModuleSnapshot(norm), parameters))
