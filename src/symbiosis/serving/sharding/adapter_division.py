"""The parts of an adapter that the shards of a model have.

An adapter is divided with its layer. Of a layer that divides its outputs, each shard has some rows of B. Of one that divides
its inputs, each has some columns of A, and the sum over shards includes the delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart, Part, PrefixPart, ReplacedPart, TrainableTokensPart
from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.distributed.partition import Style


def divide_adapter(adapter: Adapter, layers: Mapping[str, ParallelLayer], kv_heads: slice, rank: int) -> Adapter:
    """A rank's part. It has the hash of the whole."""
    parts = {path: tuple(_divide(part, layers.get(path), rank) for part in found) for path, found in adapter.parts.items()}
    parts = {path: tuple(part for part in found if not _is_empty(part)) for path, found in parts.items()}
    prefix = adapter.prefix
    if prefix is not None:
        prefix = PrefixPart(prefix.keys_LHTD[:, kv_heads], prefix.values_LHTD[:, kv_heads])
    return replace(adapter, parts=parts, prefix=prefix)


def _divide(part: Part, layer: ParallelLayer | None, rank: int) -> Part:
    if layer is None:
        return part
    own, by_outputs = layer.slices[rank], layer.style.divides_outputs
    if isinstance(part, LoraPart):
        if by_outputs:
            magnitude_O, bias_O = (None if each is None else each[own] for each in (part.magnitude_O, part.bias_O))
            return replace(part, b_OR=part.b_OR[own], magnitude_O=magnitude_O, bias_O=bias_O)
        return replace(part, a_RI=part.a_RI[:, own], bias_O=part.bias_O if rank == 0 else None)
    if isinstance(part, Ia3Part):
        return replace(part, vector=part.vector.flatten()[own]) if part.of_input != by_outputs else part
    if isinstance(part, ReplacedPart):
        if by_outputs or layer.style is Style.EMBEDDING:
            return ReplacedPart(_cut(part.weight, own), _cut(part.bias, own))
        return ReplacedPart(None if part.weight is None else part.weight[:, own], part.bias if rank == 0 else None)
    assert isinstance(part, TrainableTokensPart), part
    here = [at for at, token in enumerate(part.ids) if own.start <= token < own.stop]
    return TrainableTokensPart(tuple(part.ids[at] - own.start for at in here), part.rows_TD[here])


def _is_empty(part: Part) -> bool:
    return isinstance(part, TrainableTokensPart) and not part.ids


def _cut(tensor: Tensor | None, own: slice) -> Tensor | None:
    return None if tensor is None else tensor[own]
