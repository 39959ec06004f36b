"""Selecting the modules of a model that the executor can host.

A layer is selected only if hosting it is safe; otherwise the reason is returned.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.models.expert_groups import probe_groups
from symbiosis.models.rowwise import probe_experts, probe_linear
from symbiosis.models.weight_reads import unread_weights
from symbiosis.types import ExpertCall, LayerKind

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
    kinds = {module: kind for module in modules if (kind := kind_of(module)) is not None}
    reasons = {module: _reason_not_to_host(module, kind) for module, kind in kinds.items()}
    readers = {
        module: reader
        for module, kind in kinds.items()
        if reasons[module] is None and kind in (LayerKind.LINEAR, LayerKind.CONV1D)
        for reader in [_direct_reader(model, modules[module])]
        if reader is not None
    }
    for module in readers.keys() - unread_weights(model, readers):
        reasons[module] = f"its weight is read directly by {readers[module]}"
    for module, kind in kinds.items():
        if kind is LayerKind.EMBEDDING and not host_embeddings:
            continue
        paths, reason = modules[module], reasons[module]
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
            weights = [module.get_parameter(name) for name in weight_names(module)]
            inside = set(module.modules())
            shared = [o for weight in weights for o in owners[id(weight)] if o not in chosen and o not in inside]
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
    return LayerKind.EXPERTS if _are_experts(module) else None


def _are_experts(module: nn.Module) -> bool:
    """Whether a module may be stacked experts: a probe decides. Their weights are its own, or those of its one child."""
    if type(module).__module__.startswith("torch."):
        return False
    own, children = list(module.parameters(recurse=False)), [each for each in module.children() if list(each.parameters())]
    if own:
        return not children and any(p.dim() == 3 for p in own)
    count = getattr(module, "num_experts", None)
    if len(children) != 1 or not isinstance(count, int) or count < 1 or type(children[0]).__module__.startswith("torch."):
        return False
    weights = list(children[0].parameters())
    is_flat = len(weights) == len(list(children[0].parameters(recurse=False)))
    return is_flat and all(p.dim() == 2 and p.shape[0] % count == 0 for p in weights)


def is_modified(module: nn.Module) -> bool:
    """Whether hooks or parametrisations change what the module computes."""
    return bool(hasattr(module, "parametrizations") or module._forward_hooks or module._forward_pre_hooks)


def _reason_not_to_host(module: nn.Module, kind: LayerKind) -> str | None:
    if is_modified(module):
        return "changed by hooks or parametrisations"
    if any(not p.is_floating_point() for p in module.parameters(recurse=False)):
        return "not stored as floating point"
    if kind is LayerKind.EXPERTS:
        return None if experts_shape(module) else "stacked weights with another calling convention"
    # A subclass may override forward and still compute exactly what `nn.Linear` computes.
    if type(module).forward is not _PLAIN_FORWARD[kind] and not (kind is LayerKind.LINEAR and probe_linear(module)):
        return f"{type(module).__name__} has a forward of its own"
    if kind is LayerKind.EMBEDDING:
        assert isinstance(module, nn.Embedding)
        return "renormalises its rows" if module.max_norm is not None else None
    return "has no rows or no columns" if min(weight_matrix(module).shape) == 0 else None


def _direct_reader(model: nn.Module, paths: tuple[str, ...]) -> str | None:
    """The enclosing class with code that reads the weight's values, if any; the code may never run."""
    for parts in (path.split(".") for path in paths):
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
    return [name for name, _ in module.named_parameters()]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """How stacked experts are called."""

    experts: int
    in_width: int
    out_width: int
    call: ExpertCall


def experts_shape(module: nn.Module) -> ExpertsShape | None:
    """Of an experts module that can be hosted, else None."""
    weights = list(module.parameters())
    stacked = [p for p in weights if p.dim() == 3]
    count = stacked[0].shape[0] if stacked else int(module.num_experts)  # type: ignore[arg-type]
    if any(p.shape[0] % count for p in weights) or list(module.buffers()):
        return None
    was_training, first = module.training, (stacked or weights)[0]
    widths = dict.fromkeys([getattr(module, "hidden_dim", 0), getattr(module, "hidden_size", 0), *reversed(first.shape[-2:])])
    try:
        module.eval()
        for width in (width for width in widths if isinstance(width, int) and width):
            for call in (ExpertCall.CHOICES, ExpertCall.SEQUENCES):
                if probe_experts(module, width, count, first.dtype, first.device, call):
                    return ExpertsShape(count, width, width, call)
            if (found := probe_groups(module, count, width, first.dtype, first.device)) is not None:
                return ExpertsShape(count, width, found[1], found[0])
        return None
    finally:
        module.train(was_training)
