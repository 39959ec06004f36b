"""Selecting the modules of a model that the executor can host.

A layer is selected only if hosting it is safe; otherwise the reason is returned.
"""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.models.rowwise import probe_experts, probe_linear
from symbiosis.types import LayerKind

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Attributes of a virtual layer's weight that need no values; all others do.
_METADATA = "dtype|device|shape|ndim|size|dim|numel|is_cuda|element_size|requires_grad"
_PLAIN_FORWARD = {
    LayerKind.LINEAR: nn.Linear.forward,
    LayerKind.CONV1D: Conv1D.forward,
    LayerKind.EMBEDDING: nn.Embedding.forward,
}


def select_layers(
    model: PreTrainedModel, modules: dict[nn.Module, tuple[str, ...]], *, host_head: bool, host_embeddings: bool
) -> tuple[dict[nn.Module, LayerKind], dict[str, str]]:
    """The modules to host, in model order, and by path the reasons why others are not. `modules` has the paths of each."""
    head = model.get_output_embeddings()
    chosen: dict[nn.Module, LayerKind] = {}
    not_hosted: dict[str, str] = {}
    for module, paths in modules.items():
        kind = kind_of(module)
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
            shared = [o for name in weight_names(module) for o in owners[id(getattr(module, name))] if o not in chosen]
            if shared:
                not_hosted[modules[module][0]] = f"shares its weight with {modules[shared[0]][0]}"
                del chosen[module]
                changed = True
    return chosen, not_hosted


def kind_of(module: nn.Module) -> LayerKind | None:
    if isinstance(module, nn.Linear):
        return LayerKind.LINEAR
    if isinstance(module, Conv1D):
        return LayerKind.CONV1D
    if isinstance(module, nn.Embedding):
        return LayerKind.EMBEDDING
    stacked = any(p.dim() == 3 for p in module.parameters(recurse=False)) and not type(module).__module__.startswith("torch.")
    return LayerKind.EXPERTS if stacked and not any(list(child.parameters()) for child in module.children()) else None


def is_modified(module: nn.Module) -> bool:
    """Whether hooks or parametrisations change what the module computes."""
    return bool(hasattr(module, "parametrizations") or module._forward_hooks or module._forward_pre_hooks)


def _reason_not_to_host(model: nn.Module, module: nn.Module, kind: LayerKind, paths: tuple[str, ...]) -> str | None:
    if is_modified(module):
        return "changed by hooks or parametrisations"
    if any(not p.is_floating_point() for p in module.parameters(recurse=False)):
        return "not stored as floating point"
    if kind is LayerKind.EXPERTS:
        return None if experts_width(module) else "stacked weights with another calling convention"
    # A subclass may override forward and still compute exactly what `nn.Linear` computes.
    if type(module).forward is not _PLAIN_FORWARD[kind] and not (kind is LayerKind.LINEAR and probe_linear(module)):
        return f"{type(module).__name__} has a forward of its own"
    if kind is LayerKind.EMBEDDING:
        assert isinstance(module, nn.Embedding)
        return "renormalises its rows" if module.max_norm is not None else None
    if min(weight_matrix(module).shape) == 0:
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
        if parent_class.__module__.startswith("torch.nn") and not isinstance(parent, CONTAINERS):
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


def weight_matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer's weight"
    return weight


def weight_names(module: nn.Module) -> list[str]:
    """The parameters of a hosted module that the executor holds: all but the bias of a matrix."""
    if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
        return ["weight"]
    return [name for name, _ in module.named_parameters(recurse=False)]


def experts_width(module: nn.Module) -> int:
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
