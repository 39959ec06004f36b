"""Splitting any transformers model into base layers for the executor and a client part for tenants.

There is no list of architectures: the split walks the modules. A layer is hosted only if that is safe; otherwise it stays
with the tenant, with a reason. Weights are never copied: the executor's layers share them with the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.errors import CannotSplit
from symbiosis.models.expert_groups import take_choices
from symbiosis.models.layer_selection import (
    CONTAINERS,
    experts_shape,
    is_modified,
    kind_of,
    select_layers,
    weight_matrix,
    weight_names,
)
from symbiosis.models.loading import frozen_copy
from symbiosis.models.rowwise import BlockShape, probe_block
from symbiosis.types import ExpertCall, LayerKind, LayerSpec

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class HostedLayer:
    """A base layer: its spec, its weights and, except for plain matrices, its module."""

    spec: LayerSpec
    weights: dict[str, Tensor]
    bias: Tensor | None = None
    module: nn.Module | None = None


@dataclass(slots=True)
class Split:
    """A split model."""

    layers: list[HostedLayer] = field(default_factory=list)
    client_tensors: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Names in the client part that share another name's tensor."""
    not_hosted: dict[str, str] = field(default_factory=dict)
    """Layers that stay with the tenant although their kind can be hosted, with the reason."""
    parameters: int = 0
    hosted_parameters: int = 0

    @property
    def hosted_fraction(self) -> float:
        return self.hosted_parameters / max(1, self.parameters)

    def summary(self) -> str:
        """A readable list of what is hosted and what is not."""
        kinds: dict[str, int] = {}
        for layer in (layer for layer in self.layers if layer.spec.kind is not LayerKind.NORM):  # tenants have norms too
            kinds[layer.spec.kind.value] = kinds.get(layer.spec.kind.value, 0) + 1
        hosted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines = [f"hosts {hosted}: {self.hosted_fraction:.1%} of {self.parameters / 1e6:,.1f} M parameters"]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.not_hosted.items():
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            lines.append(f"left with the tenants: {paths[0]}{more} ({reason})")
        return "\n".join(lines)


def split(
    model: PreTrainedModel,
    *,
    host_head: bool = False,
    host_embeddings: bool = False,
    progress: Progress = lambda done, total: None,
) -> Split:
    """Split `model`. Raises `CannotSplit` if no layer of it can be hosted."""
    result = Split(parameters=sum(p.numel() for p in model.parameters()))
    modules = _paths_by_module(model)
    chosen, result.not_hosted = select_layers(model, modules, host_head=host_head, host_embeddings=host_embeddings)
    if not chosen:
        found = result.not_hosted or "none found"
        raise CannotSplit(f"{type(model).__name__} has no linear, Conv1D or expert layer that can be hosted: {found}")
    identities: dict[nn.Module, str] = {}
    counted: set[tuple[Any, Any]] = set()
    for done, (module, kind) in enumerate(chosen.items()):
        layer = _host(module, kind, modules[module])
        identities[module] = layer.spec.identity
        result.layers.append(layer)
        for weight in layer.weights.values():
            place = weight.untyped_storage()._cdata, weight.storage_offset()
            if place not in counted:
                counted.add(place)
                result.hosted_parameters += weight.numel()
        progress(done + 1, len(chosen))
    result.layers.extend(_host_blocks(modules, identities))
    result.layers = _assign_handles(result.layers, modules)
    result.layers.extend(_host_norms(modules, result.layers))
    _collect_client_part(model, chosen, result)
    return result


def _assign_handles(layers: list[HostedLayer], modules: dict[nn.Module, tuple[str, ...]]) -> list[HostedLayer]:
    """The layers in model order, so that a larger handle runs later in a forward pass."""
    order = {paths[0]: position for position, paths in enumerate(modules.values())}
    layers = sorted(layers, key=lambda layer: order[layer.spec.paths[0]])
    return [replace(layer, spec=replace(layer.spec, handle=handle)) for handle, layer in enumerate(layers)]


def _paths_by_module(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module] = (*paths.get(module, ()), path)
    return paths


def _host(module: nn.Module, kind: LayerKind, paths: tuple[str, ...]) -> HostedLayer:
    weights = {name: module.get_parameter(name).detach() for name in weight_names(module)}
    experts, expert_call = 0, ExpertCall.CHOICES
    if kind is LayerKind.LINEAR:
        out_width, in_width = weights["weight"].shape
    elif kind is LayerKind.CONV1D:
        in_width, out_width = weights["weight"].shape
    elif kind is LayerKind.EMBEDDING:
        experts, out_width = weights["weight"].shape
        in_width = 1
    else:
        shape = experts_shape(module)
        assert shape is not None, "it was selected"
        experts, in_width, out_width, expert_call = shape.experts, shape.in_width, shape.out_width, shape.call
    shapes = tuple((name, tuple(w.shape)) for name, w in weights.items())
    spec = LayerSpec(
        handle=0, identity=weights_identity(kind.value, weights), kind=kind, paths=paths,
        in_width=in_width, out_width=out_width, weights=shapes, experts=experts, expert_call=expert_call,
    )  # fmt: skip
    if kind is LayerKind.EXPERTS:
        hosted = frozen_copy(module).eval()
        take_choices(hosted, expert_call)
        return HostedLayer(spec, weights, module=hosted)
    bias = getattr(module, "bias", None)
    return HostedLayer(spec, weights, bias=None if bias is None else bias.detach())


def weights_identity(kind: str, weights: dict[str, Tensor]) -> str:
    """The identity of a hosted layer: equal where kind, names, dtypes, shapes and values are."""
    digest = hashlib.sha256(kind.encode())
    for name, weight in weights.items():
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        if weight.is_meta:  # of a plan: there are no values to hash
            digest.update(str(weight.untyped_storage()._cdata).encode())
            continue
        flat = weight.contiguous().view(-1).view(torch.uint8)
        chunks = torch.split(flat, 8 << 20)
        with ThreadPoolExecutor(min(8, len(chunks))) as pool:  # parallel: this dominates the start of a large model
            for chunk_digest in pool.map(_hash_chunk, chunks):
                digest.update(chunk_digest)
    return digest.hexdigest()


def _hash_chunk(chunk: Tensor) -> bytes:
    return hashlib.sha256(chunk.cpu().numpy().data).digest()


def _host_blocks(modules: dict[nn.Module, tuple[str, ...]], identities: dict[nn.Module, str]) -> Iterable[HostedLayer]:
    """Outermost row-wise sub-modules that consist of several hosted matrices and nothing else."""
    hosted_prefixes: list[str] = []
    probed: dict[tuple[object, ...], BlockShape | None] = {}
    for module, paths in modules.items():
        if any(path.startswith(outer) for path in paths for outer in hosted_prefixes):
            continue
        inner = [m for m in module.modules() if m in identities]
        if len(inner) < 2 or any(kind_of(m) not in (LayerKind.LINEAR, LayerKind.CONV1D) for m in inner):
            continue
        others = [m for m in module.modules() if m not in identities]
        if any(list(m.parameters(recurse=False)) for m in others) or list(module.buffers()) or isinstance(module, CONTAINERS):
            continue
        key = (type(module), _structure(module))
        if key not in probed:
            weight = weight_matrix(inner[0])
            widths = [w for m in inner for w in weight_matrix(m).shape]
            probed[key] = probe_block(module, widths, weight.dtype, weight.device)
        shape = probed[key]
        if shape is None:
            continue
        hosted_prefixes.extend(f"{path}." for path in paths)
        digest = hashlib.sha256(repr((type(module).__qualname__, _structure(module))).encode())
        for child in inner:
            digest.update(identities[child].encode())
            bias = getattr(child, "bias", None)
            if bias is not None:
                digest.update(weights_identity("bias", {"bias": bias.detach()}).encode())
        spec = LayerSpec(
            handle=0, identity=digest.hexdigest(), kind=LayerKind.BLOCK, paths=paths,
            in_width=shape.in_width, out_width=shape.out_width, train_safe=shape.train_safe,
        )  # fmt: skip
        yield HostedLayer(spec, {}, module=frozen_copy(module).eval())


def _host_norms(modules: dict[nn.Module, tuple[str, ...]], layers: list[HostedLayer]) -> Iterable[HostedLayer]:
    """Small row-wise modules that may run between hosted layers; their handles follow those of the layers."""
    widths = {layer.spec.in_width for layer in layers}
    dtypes = {weight.dtype for layer in layers for weight in layer.weights.values()}
    hosted_prefixes = [f"{path}." for layer in layers for path in layer.spec.paths]
    probed: dict[tuple[object, ...], BlockShape | None] = {}
    handle = len(layers)
    for module, paths in modules.items():
        weights = dict(module.named_parameters())
        if not weights or any(weight.dim() != 1 or {weight.dtype} != dtypes for weight in weights.values()):
            continue
        width = len(next(iter(weights.values())))
        if width not in widths or module._modules or module._buffers:
            continue
        if is_modified(module) or any(path.startswith(outer) for path in paths for outer in hosted_prefixes):
            continue
        structure = _structure(module)
        if structure not in probed:
            first = next(iter(weights.values()))
            probed[structure] = probe_block(module, [width], first.dtype, first.device)
        shape = probed[structure]
        if shape is None or shape.out_width != width or not shape.train_safe:
            continue
        identity = weights_identity(repr(structure), {name: weight.detach() for name, weight in weights.items()})
        spec = LayerSpec(
            handle=handle, identity=identity, kind=LayerKind.NORM, paths=paths, in_width=width, out_width=width
        )  # fmt: skip
        handle += 1
        yield HostedLayer(spec, {}, module=frozen_copy(module).eval())


def _structure(module: nn.Module) -> tuple[object, ...]:
    """What determines a module's behaviour besides its weights: types, shapes, plain settings."""
    found: list[object] = []
    for path, part in module.named_modules():
        plain = sorted((k, v) for k, v in vars(part).items() if isinstance(v, int | float | str | bool) and k != "layer_idx")
        shapes = sorted((n, tuple(p.shape), str(p.dtype)) for n, p in part.named_parameters(recurse=False))
        found.append((path, f"{type(part).__module__}.{type(part).__qualname__}", tuple(plain), tuple(shapes)))
    return tuple(found)


def _collect_client_part(model: nn.Module, chosen: dict[nn.Module, LayerKind], result: Split) -> None:
    hosted = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if module in chosen
        for name in weight_names(module)
    }
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in hosted:
            continue
        if id(tensor) in first:
            result.ties[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            result.client_tensors[name] = tensor.detach()
