"""An adapter as one piece of memory: all its tensors are views of it, so that one copy moves it whole.

What it shares with the base model (a weight whose bias alone was trained) is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from symbiosis.serving.lora.lora_weights import (
    EngineAdapter,
    Ia3Weights,
    LoraWeights,
    ReplacedWeights,
    TokenRows,
    VirtualTokens,
)

ALIGN = 256
"""Tensors begin at multiples of this, from the beginning of the piece; pieces are multiples of it long."""

_FIELDS = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (LoraWeights, Ia3Weights, ReplacedWeights, TokenRows, VirtualTokens)
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter and the bytes it lies in."""

    memory: Tensor
    """[size], uint8."""
    loaded: EngineAdapter

    @property
    def size(self) -> int:
        return self.memory.numel()

    def at(self, memory: Tensor) -> PackedAdapter:
        """The same adapter in other memory of this size; the caller copies the bytes."""
        own, base = self.memory.untyped_storage().data_ptr(), self.memory.data_ptr()
        view = _Views(memory)

        def moved(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() != own:
                return tensor
            return view(tensor, tensor.data_ptr() - base)

        return PackedAdapter(memory, _mapped(self.loaded, moved))


def flatten(loaded: EngineAdapter, shared: Collection[int]) -> PackedAdapter:
    """A copy in one piece of ordinary memory. `shared` are the addresses of storages that stay where they are."""
    places: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
    size = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal size
        if tensor.untyped_storage().data_ptr() not in shared and _key(tensor) not in places:
            places[_key(tensor)] = (size, tensor)
            size += aligned(tensor.numel() * tensor.element_size())
        return tensor

    _mapped(loaded, place)
    memory = torch.empty(size or ALIGN, dtype=torch.uint8)
    view = _Views(memory)
    copied = {key: view(tensor, offset).copy_(tensor) for key, (offset, tensor) in places.items()}
    return PackedAdapter(memory, _mapped(loaded, lambda tensor: copied.get(_key(tensor), tensor)))


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class _Views:
    """Tensors within a piece of memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, Tensor] = {}

    def __call__(self, like: Tensor, offset: int) -> Tensor:
        """One of the same shape, strides and dtype, `offset` bytes from the beginning."""
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._memory.view(like.dtype)
        return typed.as_strided(like.shape, like.stride(), typed.storage_offset() + offset // like.element_size())


def _mapped(loaded: EngineAdapter, change: Callable[[Tensor], Tensor]) -> EngineAdapter:
    def one(part: Any) -> Any:
        values = (getattr(part, name) for name in _FIELDS[type(part)])
        return type(part)(*[change(value) if isinstance(value, Tensor) else value for value in values])

    parts = {path: tuple(one(part) for part in found) for path, found in loaded.parts.items()}
    return EngineAdapter(loaded.hash, parts, None if loaded.virtual is None else one(loaded.virtual))
