"""Patches single modules: the module's class with a mixin in front."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class PatchedLayer(nn.Module):
    """Base of mixins that look up their layer's adapters."""

    symbiosis_path: str
    symbiosis_is_head: bool


def mix_in(module: nn.Module, mixin: type[nn.Module], **attributes: Any) -> None:
    """Put `mixin` in front of the module's class, which keeps its name, and set attributes on the module."""
    module.__class__ = _mixed_class(type(module), mixin)  # type: ignore[arg-type]
    for name, value in attributes.items():
        object.__setattr__(module, name, value)  # `nn.Module` would register a module


def plain_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear | Conv1D, bool]]:
    """All `nn.Linear` and `Conv1D` layers, no subclasses: path, layer, and whether it is the head."""
    head = model.get_output_embeddings()
    found = [(path, module, module is head) for path, module in model.named_modules()]
    return [each for each in found if type(each[1]) is nn.Linear or type(each[1]) is Conv1D]


@functools.cache
def _mixed_class(original: Any, mixin: Any) -> Any:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (mixin, original), names)
