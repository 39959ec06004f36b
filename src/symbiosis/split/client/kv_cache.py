"""KV cache with spare capacity: a new token is written in place.

transformers' `DynamicLayer` copies all keys and values at every token. It still
runs until the first new token and wherever gradients are enabled. Layers of any
other kind (sliding windows, states, quantized) are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

# B = sequences, H = heads, T = tokens, D = width of a head
_MIN_SPARE_TOKENS = 16
_SPARE_DIVISOR = 8  # spare capacity is this part of the length


def preallocate_caches(model: nn.Module) -> None:
    """Let every cache that this model returns grow in place from then on, whatever created it."""
    model.register_forward_hook(_preallocate_in_output)


def _preallocate_in_output(_: nn.Module, __: Any, output: Any) -> None:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for value in values:
        if isinstance(value, Cache):
            preallocate(value)


def preallocate(cache: Cache) -> None:
    """Let the layers of this cache that grow without bound grow in place. The cache object stays the same."""
    growing = getattr(cache, "self_attention_cache", cache)  # cross-attention is written once
    if getattr(growing, "offloading", False):  # offloading saves the memory that spare capacity needs
        return
    for layer in getattr(growing, "layers", ()):
        if type(layer) is DynamicLayer:
            layer.__class__ = PreallocatedCacheLayer


class PreallocatedBuffer:
    """Memory for a tensor [B, H, T, D] that grows in T."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.filled: Tensor | None = None
        """The view that was returned last: only this one can be continued in place."""

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`torch.cat([held, new], 2)`, without a copy of `held` if it is the last view."""
        length, count = held.shape[2], new.shape[2]
        memory = self.memory
        if memory is None or held is not self.filled or length + count > memory.shape[2]:
            memory = self.memory = _allocate(held, length + count)
        memory.narrow(2, length, count).copy_(new)
        self.filled = memory.narrow(2, 0, length + count)
        return self.filled


class PreallocatedCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer`, to the bit, whose keys and values are views of larger tensors.

    Code may replace `keys` and `values` (beams, selected sequences): only the view
    returned last, and what `crop` leaves of it, is continued in place. Tensors
    returned before a `crop` show what is written after it.
    """

    keys: Any  # Tensor | None, as in `DynamicLayer`
    values: Any
    _buffers: tuple[PreallocatedBuffer, PreallocatedBuffer] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or not (_can_append(self.keys, key_states) and _can_append(self.values, value_states)):
            self._buffers = None
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *more, **named)
            return updated
        key_buffer, value_buffer = self._buffers = self._buffers or (PreallocatedBuffer(), PreallocatedBuffer())
        self.keys, self.values = key_buffer.append(self.keys, key_states), value_buffer.append(self.values, value_states)
        return self.keys, self.values

    def crop(self, *args: Any, **named: Any) -> None:
        keys, values = self.keys, self.values
        super().crop(*args, **named)
        for buffer, before, after in zip(self._buffers or (), (keys, values), (self.keys, self.values), strict=False):
            if buffer.filled is before:
                buffer.filled = after


def _can_append(held: Tensor | None, new: Tensor) -> bool:
    """Whether `new` can be written behind `held`. Empty caches, other dtypes and wrong shapes are left to `torch.cat`."""
    if held is None or not held.dim() == new.dim() == 4 or held.dtype is not new.dtype or held.device != new.device:
        return False
    batch, heads, _, width = held.shape
    return (batch, heads, new.shape[2], width) == new.shape


def _allocate(held: Tensor, total: int) -> Tensor:
    """A larger tensor that starts with `held`."""
    length = total + max(_MIN_SPARE_TOKENS, total // _SPARE_DIVISOR)
    with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
        memory = torch.empty(*held.shape[:2], length, held.shape[3], dtype=held.dtype, device=held.device)
    memory[:, :, : held.shape[2]] = held
    return memory
