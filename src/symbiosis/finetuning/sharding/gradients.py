"""Gradients over shards.

A shard's gradient of a divided layer's adapter is a summand: of the columns or rows of the others it is zero. What every
shard computes as a whole counts once, on the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.finetuning.adapters.lora_math import TrainableLora
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter


def replicated_parameters(adapter: TrainedAdapter, layers: Mapping[str, ParallelLayer]) -> set[int]:
    """The identities of parameters whose gradient every shard computes as a whole."""
    found: set[int] = set()
    for path, part in adapter.parts.items():
        if path not in layers:
            tensors = (
                [part.a_rI, part.b_Or, part.magnitude_O, part.bias_O] if isinstance(part, TrainableLora) else [part.vector]
            )
            found |= {id(tensor) for tensor in tensors if tensor is not None}
    if adapter.virtual is not None and adapter.virtual.cache is None:  # embeddings; keys and values are divided by heads
        found |= {id(parameter) for parameter in adapter.virtual.encoder.parameters()}
    return found


def flatten(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], skipped: set[int]) -> Tensor:
    """All gradients as one vector; zeros for those that are missing or `skipped`."""
    parts = [
        torch.zeros_like(parameter).flatten() if gradient is None or id(parameter) in skipped else gradient.flatten()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat([part.float() for part in parts]) if parts else torch.zeros(0)


def unflatten(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    return [
        part.view(parameter.shape).to(parameter.dtype)
        for part, parameter in zip(torch.split(flat, sizes), parameters, strict=True)
    ]
