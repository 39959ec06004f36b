"""Fused projections: layers with the same input, adjacent in memory, form one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_PARAMETERS = ("weight", "bias")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def fuse_projections(model: PreTrainedModel) -> None:
    """Make the weights of such layers views of one matrix. Extra memory is needed for one group at a time."""
    for group in fused_groups(model):
        for name in _PARAMETERS:
            _make_adjacent(group, name)


def fused_groups(model: PreTrainedModel) -> Iterator[list[Any]]:
    """The layers whose weights `fuse_projections` makes one matrix."""
    for parent in model.modules():
        groups = [[parent._modules.get(name) for name in names] for names in _FUSED]
        yield from (group for group in groups if _can_fuse(group))


def find_fused_projections(parent: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names of linear layers that are adjacent in memory."""
    found: list[tuple[str, ...]] = []
    previous: nn.Module | None = None
    for name, layer in parent.named_children():
        if not isinstance(layer, nn.Linear):
            previous = None
            continue
        if previous is not None and all(_follows(layer._parameters[each], previous._parameters[each]) for each in _PARAMETERS):
            found[-1] = (*found[-1], name)
        else:
            found.append((name,))
        previous = layer
    return [names for names in found if len(names) > 1]


def _follows(tensor: Tensor | None, previous: Tensor | None) -> bool:
    if tensor is None or previous is None:
        return tensor is previous
    return (
        tensor.untyped_storage().data_ptr() == previous.untyped_storage().data_ptr()
        and tensor.storage_offset() == previous.storage_offset() + previous.shape[0] * previous.stride(0)
        and (tensor.shape[1:], tensor.stride()) == (previous.shape[1:], previous.stride())
    )


def _can_fuse(layers: list[Any]) -> bool:
    """Plain linear layers of equal input width, dtype and device, each alone in its memory."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    return len(kinds) == 1 and all(layer.weight.untyped_storage().nbytes() == layer.weight.nbytes for layer in layers)


def _make_adjacent(layers: list[Any], name: str) -> None:
    tensors = [getattr(layer, name) for layer in layers]
    if any(tensor is None for tensor in tensors):
        return
    fused = torch.cat([tensor.detach() for tensor in tensors])
    for layer, view in zip(layers, torch.split(fused, [tensor.shape[0] for tensor in tensors]), strict=True):
        setattr(layer, name, nn.Parameter(view, requires_grad=False))
