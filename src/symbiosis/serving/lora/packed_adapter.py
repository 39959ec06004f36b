"""An adapter packed into one buffer: all its tensors are views of it, so one copy moves the whole adapter.

Tensors shared with the base model (a weight whose bias alone was trained) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from symbiosis.adapters.packing import pack_offsets
from symbiosis.adapters.parts import Ia3Part
from symbiosis.serving.lora.lora_weights import EngineAdapter, LoraWeights, ReplacedWeights, TokenRows, VirtualTokens

ALIGNMENT = 256
"""Tensors start at multiples of this from the start of the buffer. Its size is a multiple, too."""

_FIELDS = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (LoraWeights, Ia3Part, ReplacedWeights, TokenRows, VirtualTokens)
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter and the buffer that holds its tensors."""

    memory: Tensor
    """[nbytes], uint8."""
    adapter: EngineAdapter
    others: tuple[bytes, ...] = ()
    """What the other shards have to load, by rank from 1 on; empty without shards."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def rebase(self, memory: Tensor) -> PackedAdapter:
        """The same adapter over another buffer of this size. The caller copies the bytes."""
        storage, base = self.memory.untyped_storage().data_ptr(), self.memory.data_ptr()
        view = _Views(memory)

        def move(tensor: Tensor) -> Tensor:
            is_packed = tensor.untyped_storage().data_ptr() == storage
            return view(tensor, tensor.data_ptr() - base) if is_packed else tensor

        return PackedAdapter(memory, _map_tensors(self.adapter, move), self.others)


def pack(adapter: EngineAdapter, shared: Collection[int]) -> PackedAdapter:
    """Copy an adapter into one buffer of pageable memory. `shared`: addresses of storages that are not packed."""
    unique: dict[tuple[Any, ...], Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in shared:
            unique.setdefault(_key(tensor), tensor)
        return tensor

    _map_tensors(adapter, collect)
    offsets, nbytes = pack_offsets((tensor.nbytes for tensor in unique.values()), ALIGNMENT)
    memory = torch.empty(nbytes or ALIGNMENT, dtype=torch.uint8)
    view = _Views(memory)
    copies = {key: view(t, offset).copy_(t) for (key, t), offset in zip(unique.items(), offsets, strict=True)}
    return PackedAdapter(memory, _map_tensors(adapter, lambda tensor: copies.get(_key(tensor), tensor)))


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class _Views:
    """Typed views of a buffer."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, Tensor] = {}

    def __call__(self, like: Tensor, offset: int) -> Tensor:
        """A view with the shape, strides and dtype of `like`, `offset` bytes from the start."""
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._memory.view(like.dtype)
        return typed.as_strided(like.shape, like.stride(), typed.storage_offset() + offset // like.element_size())


def _map_tensors(adapter: EngineAdapter, function: Callable[[Tensor], Tensor]) -> EngineAdapter:
    def apply(part: Any) -> Any:
        values = (getattr(part, name) for name in _FIELDS[type(part)])
        return type(part)(*[function(value) if isinstance(value, Tensor) else value for value in values])

    parts = {path: tuple(apply(part) for part in found) for path, found in adapter.parts.items()}
    return EngineAdapter(adapter.hash, parts, None if adapter.virtual is None else apply(adapter.virtual))
