"""Structured pruning of a block: fewer channels of an MLP, fewer heads of an attention. A smaller dense block remains."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.zoo.errors import NoSurrogate

# R = rows, C = channels of the MLP, H = query heads, K = KV heads (groups of query heads), d = head width
_MLP, _ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")


def is_prunable_ffn(module: nn.Module) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in _MLP)


def is_prunable_attention(module: nn.Module) -> bool:
    has_shape = isinstance(getattr(module, "head_dim", None), int) and hasattr(module, "num_key_value_groups")
    return has_shape and all(type(getattr(module, name, None)) is nn.Linear for name in _ATTENTION)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads that an attention keeps: KV groups, and query heads of each."""

    groups: int
    heads: int


def head_shapes(module: Any, keep: float) -> list[HeadShape]:
    """The largest shapes with at most `keep` of the weights, none within another."""
    groups, heads = _groups(module), int(module.num_key_value_groups)
    whole = groups * (heads + 1)  # q and o have a head's width for each head, k and v for each group
    fits = [
        HeadShape(g, h)
        for g in range(1, groups + 1)
        for h in range(1, heads + 1)
        if g * (h + 1) <= keep * whole + 1e-9 and (g, h) != (groups, heads)
    ]
    return [a for a in fits if not any(b != a and b.groups >= a.groups and b.heads >= a.heads for b in fits)]


def _groups(module: Any) -> int:
    return int(module.k_proj.out_features // module.head_dim)


def smaller_copy(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A copy of a module with other weights; layers have the shapes of their new weights. `tensors` has all of them."""
    made: Any = copy.deepcopy(module, {id(p): p for p in module.parameters()})  # not of the weights
    for name, part in list(made.named_modules()):
        if isinstance(part, nn.Linear):
            weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
            made.get_submodule(name.rpartition(".")[0])._modules[name.rpartition(".")[2]] = layer
    for name in [name for name, _ in made.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        part = made.get_submodule(owner)
        part._parameters[leaf] = nn.Parameter(tensors[name].clone())
    for part in made.modules():
        if all(hasattr(part, name) for name in (*_ATTENTION, "num_key_value_groups")):
            part.num_key_value_groups = part.q_proj.out_features // part.k_proj.out_features
        if all(hasattr(part, name) for name in _MLP) and hasattr(part, "intermediate_size"):
            part.intermediate_size = part.gate_proj.out_features
    return made.eval()  # type: ignore[no-any-return]


def prune_ffn(module: Any, activations_RC: Tensor, keep: float) -> nn.Module:
    """Keep the channels whose activations contribute most to the output. `activations_RC` is what `down_proj` reads."""
    channels = module.down_proj.in_features
    count = _count_kept(channels, keep, "channels of the FFN")
    strength = activations_RC.float().square().mean(0) * module.down_proj.weight.float().square().sum(0)
    kept = strength.topk(count).indices.sort().values
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    for name in ("gate_proj", "up_proj"):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in tensors:
                tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][kept]
    tensors["down_proj.weight"] = tensors["down_proj.weight"][:, kept]
    return smaller_copy(module, _with_bias(tensors, "down_proj"))


def prune_attention(module: Any, activations_RC: Tensor, shape: HeadShape) -> nn.Module:
    """Keep the heads that contribute most to the output, of the groups that do. `activations_RC` is what `o_proj` reads."""
    groups, heads, width = _groups(module), int(module.num_key_value_groups), int(module.head_dim)
    strength = activations_RC.float().square().mean(0) * module.o_proj.weight.float().square().sum(0)
    of_heads_KH = strength.view(groups, heads, width).sum(-1)
    best = of_heads_KH.topk(shape.heads, dim=1)
    kept_groups = best.values.sum(1).topk(shape.groups).indices.sort().values
    kept_heads = (best.indices.sort(1).values + heads * torch.arange(groups, device=strength.device)[:, None])[kept_groups]
    rows_q = (kept_heads.flatten()[:, None] * width + torch.arange(width, device=strength.device)).flatten()
    rows_kv = (kept_groups[:, None] * width + torch.arange(width, device=strength.device)).flatten()
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    for name, rows in (("q_proj", rows_q), ("k_proj", rows_kv), ("v_proj", rows_kv)):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in tensors:
                tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][rows]
    tensors["o_proj.weight"] = tensors["o_proj.weight"][:, rows_q]
    return smaller_copy(module, _with_bias(tensors, "o_proj"))


def _with_bias(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The last layer of a surrogate has a bias: the mean of what was removed."""
    weight = tensors[f"{name}.weight"]
    return {**tensors, f"{name}.bias": tensors.get(f"{name}.bias", torch.zeros(len(weight), dtype=weight.dtype))}


def _count_kept(whole: int, keep: float, what: str) -> int:
    count = int(whole * keep + 1e-9)
    if count >= 8:
        count -= count % 8  # kernels of matrix products like multiples
    if not 0 < count < whole:
        raise NoSurrogate(
            f"keep={keep:g} of {whole} {what} leaves {max(count, 0)}: expected a share that leaves some, but not all"
        )
    return count
