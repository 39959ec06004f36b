"""A model whose modules have a variant for each block: a batch of several chains runs through it in one pass.

The model is that of one chain, with other modules in the places where chains differ. Modules that all chains share stay. A
decoder layer is one place if its attention and its FFN are shared by the same chains. Otherwise its parts are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.errors import CannotServe
from symbiosis.serving.chains.chain import state_key
from symbiosis.serving.chains.row_groups import Partition, RowGroups
from symbiosis.serving.model.decoder_layer import FusedDecoderLayer, unfuse_layers


class GroupedModule(nn.Module):
    """Computes each group of rows by its variant."""

    variants: tuple[nn.Module, ...]

    def __init__(self, variants: Sequence[nn.Module], partition: Partition, groups: RowGroups, *, is_head: bool) -> None:
        super().__init__()
        self.owners = nn.ModuleList(variants)  # a model asks its parameters for their device
        object.__setattr__(self, "variants", tuple(variants))
        self._partition, self._groups, self._is_head = partition, groups, is_head

    def __getattr__(self, name: str) -> Any:
        """Models ask their layers for settings such as `attention_type`: all variants have the same."""
        return getattr(self.variants[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        groups, num_rows = self._groups, _num_rows(args, kwargs)
        found = groups.at(self._partition)
        if len(found) == 1 or not num_rows:  # a head may read no rows
            groups.enter(groups.whole)
            return self.variants[found[0].variant](*args, **kwargs)
        results, taken = [], []
        for group in found:
            rows = group.head_rows if self._is_head else group.rows
            if _count(rows):
                groups.enter(group.context)
                own = {name: _take(value, rows, num_rows) for name, value in kwargs.items()}
                results.append(self.variants[group.variant](*[_take(value, rows, num_rows) for value in args], **own))
                taken.append(rows)
        groups.enter(groups.whole)
        return _join(results, taken, num_rows)


def graft_chains(models: Sequence[PreTrainedModel], layers: int, groups: RowGroups) -> PreTrainedModel:
    """The first model with grouped modules where the models differ. It shares all other modules with the first one.

    Raises `CannotServe` if they differ where no rows can be grouped.
    """
    replaced: dict[str, nn.Module] = {}
    head = models[0].get_output_embeddings()

    def add(path: str, modules: Sequence[nn.Module]) -> None:
        replaced[path] = _group(modules, groups, is_head=modules[0] is head)

    def visit(path: str, modules: Sequence[nn.Module]) -> None:
        """Of the modules that hold others: models and lists of layers."""
        if len({state_key(module) for module in modules}) == 1:
            return
        if path and not _has_layers(modules[0], layers):
            add(path, modules)
            return
        if len({_own_key(module) for module in modules}) > 1:
            raise CannotServe(f"{path or 'the model'} has tensors of its own that differ between chains: expected only modules")
        for name, children in _children(modules):
            child = f"{path}.{name}" if path else name
            if isinstance(modules[0], nn.ModuleList):
                visit_layer(child, children)
            else:
                visit(child, children)

    def visit_layer(path: str, modules: Sequence[nn.Module]) -> None:
        parts = [each for _, each in _children(modules) if state_key(each[0])]
        whole, by_part = _partition(modules), [_partition(each) for each in parts]
        if len(set(whole)) == 1:
            return
        is_cut = len({_own_key(module) for module in modules}) == 1 and any(part != whole for part in by_part)
        if not is_cut:
            add(path, modules)
            return
        for name, children in _children(modules):
            if len(set(_partition(children))) > 1:
                add(f"{path}.{name}", children)

    if not _has_layers(models[0], layers):
        raise CannotServe(f"{type(models[0]).__name__} has no list of {layers} layers: expected one, to group rows at each")
    visit("", models)
    return _graft(models[0], replaced)


def _group(modules: Sequence[nn.Module], groups: RowGroups, *, is_head: bool) -> GroupedModule:
    partition = _partition(modules)
    variants = [modules[partition.index(variant)] for variant in range(max(partition) + 1)]
    return GroupedModule(variants, partition, groups, is_head=is_head)


def _partition(modules: Sequence[nn.Module]) -> Partition:
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(state_key(module), len(numbers)) for module in modules)


def _children(modules: Sequence[nn.Module]) -> list[tuple[str, list[nn.Module]]]:
    return [(name, [module.get_submodule(name) for module in modules]) for name, _ in modules[0].named_children()]


def _own_key(module: nn.Module) -> tuple[int, ...]:
    """Where a module's own tensors are, without those of its children."""
    persistent = [buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set]
    return tuple(tensor.data_ptr() for tensor in (*module._parameters.values(), *persistent) if tensor is not None)


def _has_layers(module: nn.Module, layers: int) -> bool:
    """Whether it holds the list of all decoder layers, or is it."""
    return any(isinstance(each, nn.ModuleList) and len(each) == layers for each in module.modules())


def _graft(module: Any, replaced: Mapping[str, nn.Module]) -> Any:
    """A copy of the modules on the way to those that are replaced; all others are shared."""
    if not replaced:
        return module
    made = copy.copy(module)
    made._modules = dict(module._modules)
    if isinstance(made, FusedDecoderLayer):
        unfuse_layers(made)
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, new in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = new
        else:
            made._modules[name] = new
    for name, parts in inner.items():
        made._modules[name] = _graft(module._modules[name], parts)
    return made


def _num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a module's input: [1, rows, …] or [rows, …]."""
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return first.shape[1] if first.dim() > 1 and first.shape[0] == 1 else first.shape[0]


def _row_dim(value: Tensor, num_rows: int) -> int | None:
    if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] == num_rows:
        return 1
    return 0 if value.dim() and value.shape[0] == num_rows else None


def _take(value: Any, rows: slice | Tensor, num_rows: int) -> Any:
    """These rows of an argument; others than tensors with so many rows stay."""
    if isinstance(value, tuple | list):
        return type(value)(_take(each, rows, num_rows) for each in value)
    if not isinstance(value, Tensor) or (dim := _row_dim(value, num_rows)) is None:
        return value
    if isinstance(rows, slice):
        return value.narrow(dim, rows.start, rows.stop - rows.start)
    return value.index_select(dim, rows)


def _join(results: list[Any], rows: list[slice | Tensor], num_rows: int) -> Any:
    """Results of groups, in the order of the batch."""
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(_join([each[index] for each in results], rows, num_rows) for index in range(len(first)))
    if not isinstance(first, Tensor):
        return first
    dim = 1 if first.dim() > 1 and first.shape[0] == 1 and _count(rows[0]) == first.shape[1] else 0
    starts = [each.start if isinstance(each, slice) else -1 for each in rows]
    if min(starts) >= 0:
        order = sorted(range(len(rows)), key=lambda index: starts[index])
        return torch.cat([results[index] for index in order], dim)
    shape = list(first.shape)
    shape[dim] = num_rows
    joined = first.new_empty(shape)
    for result, own in zip(results, rows, strict=True):
        if isinstance(own, slice):
            joined.narrow(dim, own.start, own.stop - own.start).copy_(result)
        else:
            joined.index_copy_(dim, own, result)
    return joined


def _count(rows: slice | Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
