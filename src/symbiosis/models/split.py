"""Splitting any transformers model into base layers for the executor and a client part for tenants.

There is no list of architectures: the split walks the modules. A layer is hosted only if that is safe; otherwise it stays
with the tenant, with a reason. Weights are never copied: the executor's layers share them with the model.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import CannotSplit
from symbiosis.models.rowwise import BlockShape, probe_block, probe_experts, probe_linear
from symbiosis.types import LayerKind, LayerSpec

Progress = Callable[[int, int], None]

# Attributes of a virtual layer's weight that need no values; all others do.
_METADATA = "dtype|device|shape|ndim|size|dim|numel|is_cuda|element_size|requires_grad"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
    chosen = _choose(model, modules, host_head=host_head, host_embeddings=host_embeddings, not_hosted=result.not_hosted)
    if not chosen:
        found = result.not_hosted or "none found"
        raise CannotSplit(f"{type(model).__name__} has no linear, Conv1D or expert layer that can be hosted: {found}")
    identities: dict[nn.Module, str] = {}
    counted: set[int] = set()
    for done, (module, kind) in enumerate(chosen.items()):
        layer = _host(module, kind, modules[module])
        identities[module] = layer.spec.identity
        result.layers.append(layer)
        for weight in layer.weights.values():
            if weight.data_ptr() not in counted:
                counted.add(weight.data_ptr())
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


def _choose(
    model: PreTrainedModel,
    modules: dict[nn.Module, tuple[str, ...]],
    *,
    host_head: bool,
    host_embeddings: bool,
    not_hosted: dict[str, str],
) -> dict[nn.Module, LayerKind]:
    """The modules to host, in model order."""
    head = model.get_output_embeddings()
    chosen: dict[nn.Module, LayerKind] = {}
    for module, paths in modules.items():
        kind = _kind_of(module)
        if kind is None or (kind is LayerKind.EMBEDDING and not host_embeddings):
            continue
        reason = _reason_not_to_host(model, module, kind, paths)
        if reason is None and module is head and not host_head:
            reason = "the head"
        if reason is None and kind is LayerKind.EMBEDDING and module is not model.get_input_embeddings():
            reason = "not the model's word embeddings"
        if reason is None:
            chosen[module] = kind
        else:
            not_hosted[paths[0]] = reason
    # A weight shared with a module that is not hosted cannot be hosted either.
    owners: dict[int, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    changed = True
    while changed:
        changed = False
        for module in list(chosen):
            shared = [o for name in _weight_names(module) for o in owners[id(getattr(module, name))] if o not in chosen]
            if shared:
                not_hosted[modules[module][0]] = f"shares its weight with {modules[shared[0]][0]}"
                del chosen[module]
                changed = True
    return chosen


def _kind_of(module: nn.Module) -> LayerKind | None:
    if isinstance(module, nn.Linear):
        return LayerKind.LINEAR
    if isinstance(module, Conv1D):
        return LayerKind.CONV1D
    if isinstance(module, nn.Embedding):
        return LayerKind.EMBEDDING
    stacked = any(p.dim() == 3 for p in module.parameters(recurse=False)) and not type(module).__module__.startswith("torch.")
    return LayerKind.EXPERTS if stacked and not any(list(child.parameters()) for child in module.children()) else None


_PLAIN_FORWARD = {
    LayerKind.LINEAR: nn.Linear.forward,
    LayerKind.CONV1D: Conv1D.forward,
    LayerKind.EMBEDDING: nn.Embedding.forward,
}


def _reason_not_to_host(model: nn.Module, module: nn.Module, kind: LayerKind, paths: tuple[str, ...]) -> str | None:
    if hasattr(module, "parametrizations") or module._forward_hooks or module._forward_pre_hooks:
        return "changed by hooks or parametrisations"
    if any(not p.is_floating_point() for p in module.parameters(recurse=False)):
        return "not stored as floating point"
    if kind is LayerKind.EXPERTS:
        return None if _experts_width(module) else "stacked weights with another calling convention"
    # A subclass may override forward and still compute exactly what `nn.Linear` computes.
    if type(module).forward is not _PLAIN_FORWARD[kind] and not (kind is LayerKind.LINEAR and probe_linear(module)):
        return f"{type(module).__name__} has a forward of its own"
    if kind is LayerKind.EMBEDDING:
        assert isinstance(module, nn.Embedding)
        return "renormalises its rows" if module.max_norm is not None else None
    if min(_matrix(module).shape) == 0:
        return "has no rows or no columns"
    for path in paths:
        reader = _direct_reader(model, path)
        if reader:
            return f"its weight is read directly by {reader}"
    return None


def _direct_reader(model: nn.Module, path: str) -> str | None:
    """The enclosing class whose code reads the weight's values, if any."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent = model.get_submodule(".".join(parts[:depth]))
        parent_class: Any = type(parent)
        if parent_class.__module__.startswith("torch.nn") and not isinstance(parent, _CONTAINERS):
            return str(parent_class.__name__)
        name = next((part for part in reversed(parts[depth:]) if not part.isdigit()), None)
        if name and _reads_weight(parent_class, name):
            return str(parent_class.__name__)
    return None


@lru_cache(maxsize=4096)
def _reads_weight(owner: Any, name: str) -> bool:
    pattern = re.compile(rf"\b{re.escape(name)}(\[[^\]]*\])?\.weight\b(?!\s*\.\s*({_METADATA})\b)")
    for base in owner.__mro__:
        if base.__module__.startswith("torch.") or base in (object, PreTrainedModel):
            continue
        for attribute, value in vars(base).items():
            if attribute in ("__init__", "_init_weights", "reset_parameters", "tie_weights"):
                continue
            code = inspect.unwrap(value) if callable(value) else value
            if not inspect.isfunction(code):
                continue
            try:
                source = inspect.getsource(code)
            except (OSError, TypeError):
                continue
            if pattern.search(re.sub(r"isinstance\([^()]*\)", "", source)):
                return True
    return False


def _matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer's weight"
    return weight


def _weight_names(module: nn.Module) -> list[str]:
    """The parameters of a hosted module that the executor holds: all but the bias of a matrix."""
    if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
        return ["weight"]
    return [name for name, _ in module.named_parameters(recurse=False)]


def _experts_width(module: nn.Module) -> int:
    """The row width of an experts module that can be hosted, else 0."""
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    count = stacked[0].shape[0]
    if any(p.shape[0] != count for p in module.parameters(recurse=False)) or list(module.buffers()):
        return 0
    was_training, first = module.training, stacked[0]
    widths = dict.fromkeys(
        [getattr(module, "hidden_dim", 0), getattr(module, "hidden_size", 0), first.shape[2], first.shape[1]]
    )
    try:
        for width in widths:
            if isinstance(width, int) and width and probe_experts(module.eval(), width, count, first.dtype, first.device):
                return width
        return 0
    finally:
        module.train(was_training)


def _host(module: nn.Module, kind: LayerKind, paths: tuple[str, ...]) -> HostedLayer:
    weights = {name: getattr(module, name).detach() for name in _weight_names(module)}
    experts = 0
    if kind is LayerKind.LINEAR:
        out_width, in_width = weights["weight"].shape
    elif kind is LayerKind.CONV1D:
        in_width, out_width = weights["weight"].shape
    elif kind is LayerKind.EMBEDDING:
        experts, out_width = weights["weight"].shape
        in_width = 1
    else:
        in_width = out_width = _experts_width(module)
        experts = next(w for w in weights.values() if w.dim() == 3).shape[0]
    spec = LayerSpec(
        handle=0,
        identity=_identity(kind.value, weights),
        kind=kind,
        paths=paths,
        in_width=in_width,
        out_width=out_width,
        weights=tuple((name, tuple(w.shape)) for name, w in weights.items()),
        experts=experts,
    )
    if kind is LayerKind.EXPERTS:
        return HostedLayer(spec, weights, module=_frozen_copy(module))
    bias = getattr(module, "bias", None)
    return HostedLayer(spec, weights, bias=None if bias is None else bias.detach())


def _identity(kind: str, weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(kind.encode())
    for name, weight in weights.items():
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        flat = weight.contiguous().view(-1).view(torch.uint8)
        chunks = torch.split(flat, 8 << 20)
        with ThreadPoolExecutor(min(8, len(chunks))) as pool:  # parallel: this dominates the start of a large model
            for chunk_digest in pool.map(_hash_chunk, chunks):
                digest.update(chunk_digest)
    return digest.hexdigest()


def _hash_chunk(chunk: Tensor) -> bytes:
    return hashlib.sha256(chunk.cpu().numpy().data).digest()


def _frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of the module in evaluation mode that shares its weights and never trains them."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(module, memo).eval()


def _host_blocks(modules: dict[nn.Module, tuple[str, ...]], identities: dict[nn.Module, str]) -> Iterable[HostedLayer]:
    """Outermost row-wise sub-modules that consist of several hosted matrices and nothing else."""
    hosted_prefixes: list[str] = []
    probed: dict[tuple[object, ...], BlockShape | None] = {}
    for module, paths in modules.items():
        if any(path.startswith(outer) for path in paths for outer in hosted_prefixes):
            continue
        inner = [m for m in module.modules() if m in identities]
        if len(inner) < 2 or any(_kind_of(m) not in (LayerKind.LINEAR, LayerKind.CONV1D) for m in inner):
            continue
        others = [m for m in module.modules() if m not in identities]
        if any(list(m.parameters(recurse=False)) for m in others) or list(module.buffers()) or isinstance(module, _CONTAINERS):
            continue
        key = (type(module), _structure(module))
        if key not in probed:
            weight = _matrix(inner[0])
            widths = [w for m in inner for w in _matrix(m).shape]
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
                digest.update(_identity("bias", {"bias": bias.detach()}).encode())
        spec = LayerSpec(
            handle=0,
            identity=digest.hexdigest(),
            kind=LayerKind.BLOCK,
            paths=paths,
            in_width=shape.in_width,
            out_width=shape.out_width,
            train_safe=shape.train_safe,
        )
        yield HostedLayer(spec, {}, module=_frozen_copy(module))


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
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
            continue
        if any(path.startswith(outer) for path in paths for outer in hosted_prefixes):
            continue
        structure = _structure(module)
        if structure not in probed:
            first = next(iter(weights.values()))
            probed[structure] = probe_block(module, [width], first.dtype, first.device)
        shape = probed[structure]
        if shape is None or shape.out_width != width or not shape.train_safe:
            continue
        identity = _identity(repr(structure), {name: weight.detach() for name, weight in weights.items()})
        spec = LayerSpec(
            handle=handle, identity=identity, kind=LayerKind.NORM, paths=paths, in_width=width, out_width=width
        )  # fmt: skip
        handle += 1
        yield HostedLayer(spec, {}, module=_frozen_copy(module))


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
        for name in _weight_names(module)
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
