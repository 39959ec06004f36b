"""Which part of each parameter a shard holds, from the tensor-parallel plan that transformers has of a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import CannotServe


class Style(StrEnum):
    """How the shards compute a layer together, by its name in transformers' plans."""

    COLUMN = "colwise"
    """Each has some outputs, which the next layer reads as inputs."""
    ROW = "rowwise"
    """Each has some inputs; the results are summed."""
    GATHERED_COLUMN = "colwise_gather_output"
    """Each computes some outputs; all get all of them."""
    DIVIDED_ROW = "rowwise_split_input"
    """As ROW, but all have the whole input."""
    EMBEDDING = "embedding_rowwise"
    """Each has some rows of the vocabulary; the results are summed."""
    EXPERTS = "moe_tp_experts"
    """Stacked experts, each divided by its inner width; the results are summed."""

    @property
    def divides_outputs(self) -> bool:
        return self in (Style.COLUMN, Style.GATHERED_COLUMN)


_PACKED = {"packed_colwise": Style.COLUMN, "packed_rowwise": Style.ROW}
_REPLICATED = ("replicated_with_grad_allreduce",)


@dataclass(frozen=True, slots=True)
class LayerPartition:
    """A layer and its slices of the divided width, by rank."""

    style: Style
    slices: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterPartition:
    """A parameter and its slices, by rank, along one dimension; several slices for packed matrices."""

    dim: int
    slices: tuple[tuple[slice, ...], ...]

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """A copy of a rank's part."""
        parts = [whole.detach().narrow(self.dim, each.start, each.stop - each.start) for each in self.slices[rank]]
        return torch.cat(parts, self.dim)


def divide_evenly(length: int, parts: int, unit: int = 1) -> tuple[slice, ...]:
    """Slices of whole units whose numbers differ by one at most."""
    units, ends = length // unit, [0]
    for part in range(parts):
        ends.append(ends[-1] + units // parts + (part < units % parts))
    return tuple(slice(start * unit, end * unit) for start, end in itertools.pairwise(ends))


@dataclass(frozen=True, slots=True)
class ModelPartition:
    """The partition of a model's layers by path, and of its parameters by name. Others are whole on every shard."""

    layers: Mapping[str, LayerPartition]
    parameters: Mapping[str, ParameterPartition]
    kv_heads: tuple[slice, ...]
    """By rank."""

    @staticmethod
    def of(model: PreTrainedModel, kv_heads: int, size: int) -> ModelPartition:
        """The partition for `size` shards. Raises `CannotServe` with the reason if the model cannot be divided."""
        name = type(model).__name__
        if not (plan := _read_plan(model)):
            raise CannotServe(f"{name} cannot be hosted on several shards: transformers has no tensor-parallel plan of it")
        if kv_heads < size:
            raise CannotServe(
                f"{name} has {kv_heads} key-value heads, which {size} shards cannot divide: expected at most {kv_heads} shards"
            )
        layers: dict[str, LayerPartition] = {}
        parameters: dict[str, ParameterPartition] = {}
        embedding = model.get_input_embeddings()
        for path, module, style in _layers(model, plan):
            if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
                heads = kv_heads if _is_attention(model, path) else 0
                partition = _divide_layer(module, style, size, heads=heads)
                layers[path] = partition
                _divide_parameters(path, module, partition, parameters)
            elif style is Style.EXPERTS:
                layers[path] = LayerPartition(style)
            elif module is not None:
                raise CannotServe(f"{name} cannot be divided: {path} is a {type(module).__name__}, expected a linear layer")
        _divide_experts(model, plan, parameters, size)
        _follow_ties(model, embedding, layers, parameters, size)
        is_divided = any(each.style is Style.COLUMN and _is_attention(model, path) for path, each in layers.items())
        by_rank = divide_evenly(kv_heads, size) if is_divided else (slice(0, kv_heads),) * size
        return ModelPartition(layers, parameters, by_rank)


def _is_attention(model: PreTrainedModel, path: str) -> bool:
    """Whether a layer belongs to an attention module."""
    return hasattr(model.get_submodule(path.rpartition(".")[0]), "layer_idx")


def _read_plan(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan; patterns of paths and their styles."""
    plan: Any = getattr(model, "tp_plan", None) or {}
    return {str(pattern): str(style) for pattern, style in dict(plan).items() if style not in _REPLICATED}


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _find_style(path: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if _matches(pattern, path)), None)


def _layers(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, Any, Style]]:
    for path, module in model.named_modules():
        style = _find_style(path, plan)
        if style is None:
            continue
        if style not in list(Style):
            raise CannotServe(
                f"{type(model).__name__} cannot be divided: its plan has the style {style!r} for {path}, "
                f"expected one of {', '.join(Style)}"
            )
        yield path, module, Style(style)


def _divide_layer(module: Any, style: Style, size: int, *, heads: int) -> LayerPartition:
    """`heads`: key-value heads of an attention's layer, which stay whole, each with its query heads."""
    if isinstance(module, nn.Embedding):
        return LayerPartition(Style.EMBEDDING, divide_evenly(module.num_embeddings, size))
    outputs, inputs = (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
    width = outputs if style.divides_outputs else inputs
    is_by_heads = heads and width % heads == 0 and style in (Style.COLUMN, Style.ROW)
    unit = width // heads if is_by_heads else 1
    return LayerPartition(style, divide_evenly(width, size, unit))


def _divide_parameters(
    path: str, module: nn.Module, partition: LayerPartition, parameters: dict[str, ParameterPartition]
) -> None:
    slices = tuple((each,) for each in partition.slices)
    by_rows = partition.style.divides_outputs or partition.style is Style.EMBEDDING
    parameters[f"{path}.weight"] = ParameterPartition(0 if by_rows != isinstance(module, Conv1D) else 1, slices)
    if getattr(module, "bias", None) is None:
        return
    if partition.style.divides_outputs:
        parameters[f"{path}.bias"] = ParameterPartition(0, slices)
    # A row-parallel layer adds its bias once: `ParallelModel` removes it from all shards but the first.


def _divide_experts(
    model: PreTrainedModel, plan: Mapping[str, str], parameters: dict[str, ParameterPartition], size: int
) -> None:
    """Parameters that stack the matrices of experts: [experts, rows, columns]."""
    for name, parameter in model.named_parameters():
        style = _find_style(name, plan)
        if style is None or name in parameters:
            continue
        packed = _PACKED.get(style)
        if parameter.dim() != 3 or (packed is None and style not in (Style.COLUMN, Style.ROW)):
            raise CannotServe(f"{type(model).__name__} cannot be divided: its plan has the style {style!r} for {name}")
        dim = 1 if (packed or Style(style)) is Style.COLUMN else 2
        width = parameter.shape[dim]
        if packed is None:
            slices: Sequence[tuple[slice, ...]] = [(each,) for each in divide_evenly(width, size)]
        else:
            half = width // 2
            slices = [(each, slice(each.start + half, each.stop + half)) for each in divide_evenly(half, size)]
        parameters[name] = ParameterPartition(dim, tuple(slices))


def _follow_ties(
    model: PreTrainedModel,
    embedding: Any,
    layers: dict[str, LayerPartition],
    parameters: dict[str, ParameterPartition],
    size: int,
) -> None:
    """The vocabulary is divided in the embedding and in the head, whatever the plan says."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if path in layers or module not in (embedding, head):
            continue
        if type(module) is nn.Linear:
            layers[path] = LayerPartition(Style.GATHERED_COLUMN, divide_evenly(module.out_features, size))
        elif isinstance(module, nn.Embedding):
            layers[path] = LayerPartition(Style.EMBEDDING, divide_evenly(module.num_embeddings, size))
        else:
            continue
        _divide_parameters(path, module, layers[path], parameters)
