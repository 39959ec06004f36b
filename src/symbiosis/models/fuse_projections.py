"""Layers that read the same rows, laid next to each other in memory: together they are one matrix.

On ARM processors columns come first: a library that packs a weight for every
product then has less to do, which for a few dozen rows is a fifth of the time.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ARM = platform.machine() in ("aarch64", "arm64")
_PARTS = ("weight", "bias")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.no_grad()
def fuse_projections(model: PreTrainedModel) -> None:
    """Move the weights of such layers; each layer's becomes a view. No memory is needed but for one of them at a time."""
    head = model.get_output_embeddings()
    for parent in model.modules():
        groups = [[parent._modules.get(name) for name in names] for names in _TOGETHER]
        joined = [group for group in groups if _alike(group)]
        for group in joined:
            for name in _PARTS:
                _lay_out(group, name)
        known = [id(layer) for group in joined for layer in group]
        for layer in parent.children():
            if _columns_first(layer) and layer is not head and id(layer) not in known and _alike([layer]):
                _lay_out([layer], "weight")


def _columns_first(layer: Any) -> bool:
    return _ARM and type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype is torch.float32


def find_fused_projections(parent: nn.Module) -> list[tuple[str, ...]]:
    """Names of its layers that lie next to each other."""
    found: list[tuple[str, ...]] = []
    before: nn.Module | None = None
    for name, layer in parent.named_children():
        if not isinstance(layer, nn.Linear):
            before = None
            continue
        if before is not None and all(_follows(layer._parameters[part], before._parameters[part]) for part in _PARTS):
            found[-1] = (*found[-1], name)
        else:
            found.append((name,))
        before = layer
    return [names for names in found if len(names) > 1]


def _follows(tensor: Tensor | None, before: Tensor | None) -> bool:
    if tensor is None or before is None:
        return tensor is before
    return (
        tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and tensor.storage_offset() == before.storage_offset() + before.shape[0] * before.stride(0)
        and (tensor.shape[1:], tensor.stride()) == (before.shape[1:], before.stride())
    )


def _alike(layers: list[Any]) -> bool:
    """Plain linear layers of one input width, dtype and device, with weights of their own."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    return len(kinds) == 1 and all(layer.weight.untyped_storage().nbytes() == layer.weight.nbytes for layer in layers)


def _lay_out(layers: list[Any], name: str) -> None:
    parts = [getattr(layer, name) for layer in layers]
    if any(part is None for part in parts):
        return
    joined = torch.cat([part.detach() for part in parts])
    if name == "weight" and _columns_first(layers[0]):
        joined = joined.t().contiguous().t()
    for layer, part in zip(layers, torch.split(joined, [part.shape[0] for part in parts]), strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
