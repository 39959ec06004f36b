"""The part of a weight that this shard holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.parallel_model import WeightPart

Shape = tuple[tuple[int, ...], torch.dtype]


def divide(length: int, parts: int) -> list[slice]:
    """Slices of about equal length; the last ones may be empty."""
    size = -(-length // parts)
    return [slice(min(length, part * size), min(length, (part + 1) * size)) for part in range(parts)]


class ShardedWeight:
    """One weight, divided along a dimension. Each rank has one part."""

    def __init__(self, weight: Tensor, dim: int, mesh: ShardMesh, given: WeightPart | None = None) -> None:
        """The whole weight may be freed afterwards. `given` is its part, if it has been divided already."""
        self.shape, self.dtype, self.dim = tuple(weight.shape), weight.dtype, dim
        if given is not None:
            self.dim, self.slices, self.part = given.dim, list(given.slices), given.part
            return
        self.slices = divide(weight.shape[dim], mesh.size)
        own = self.slices[mesh.rank]
        self.part = weight.detach().narrow(dim, own.start, own.stop - own.start).to(mesh.device, copy=True).contiguous()

    def part_shape(self, rank: int) -> Shape:
        part = self.slices[rank]
        return (*self.shape[: self.dim], part.stop - part.start, *self.shape[self.dim + 1 :]), self.dtype

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole weight from its parts, by rank."""
        return torch.cat(list(parts), dim=self.dim)


def gather(weights: Sequence[ShardedWeight], mesh: ShardMesh) -> list[Tensor]:
    """The whole weights. The other ranks call `contribute` with the same weights."""
    received = {rank: mesh.receive([weight.part_shape(rank) for weight in weights], rank) for rank in mesh.others}
    parts = {rank: each.wait() for rank, each in received.items()} | {mesh.rank: [weight.part for weight in weights]}
    return [weight.assemble([parts[rank][i] for rank in range(mesh.size)]) for i, weight in enumerate(weights)]


def contribute(weights: Sequence[ShardedWeight], mesh: ShardMesh, origin: int) -> None:
    """Send this rank's parts to the rank that gathers them."""
    for work in mesh.send([weight.part for weight in weights], origin):
        work.wait()
