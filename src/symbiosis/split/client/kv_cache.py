"""Keys and values of a tenant's sequences with room to grow: a new token is written in place, the others stay where they are.

transformers' own cache copies everything at every token. It is still what runs
until the first new token, wherever gradients may be wanted, and in layers of
any other kind (windows, states, quantised): there nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

# B = sequences, H = heads, T = tokens, D = width of a head
_LEAST_SPARE = 16  # tokens
_SPARE_SHARE = 8  # one in so many


def make_room(model: nn.Module) -> None:
    """Let every cache this model hands out, made by itself, by `generate` or by its caller, grow in place from then on."""
    model.register_forward_hook(_in_the_output)


def _in_the_output(_: nn.Module, __: Any, output: Any) -> None:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for value in values:
        if isinstance(value, Cache):
            give_room(value)


def give_room(cache: Cache) -> None:
    """Let the layers of this cache that grow without bound grow in place; the cache stays the object it is."""
    growing = getattr(cache, "self_attention_cache", cache)  # what comes from an encoder is written once
    if getattr(growing, "offloading", False):  # it is given room elsewhere, to save ours
        return
    for layer in getattr(growing, "layers", ()):
        if type(layer) is DynamicLayer:
            layer.__class__ = PreallocatedCacheLayer


class PreallocatedBuffer:
    """Memory for a tensor [B, H, T, D] that grows in T."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.filled: Tensor | None = None
        """The view of it that was handed out last: what may be continued in place."""

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`torch.cat([held, new], 2)`, without a copy of `held` if it is what fills this memory."""
        length, count = held.shape[2], new.shape[2]
        memory = self.memory
        if memory is None or held is not self.filled or length + count > memory.shape[2]:
            memory = self.memory = _roomy(held, length + count)
        memory.narrow(2, length, count).copy_(new)
        self.filled = memory.narrow(2, 0, length + count)
        return self.filled


class PreallocatedCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer`, to the bit, whose keys and values fill the begin of larger tensors.

    Whoever replaces `keys` and `values` (beams, selected sequences) need not know:
    in place is continued what was handed out last, and what `crop` leaves of it.
    Tensors handed out before a `crop` show what is written after it.
    """

    keys: Any  # Tensor | None, as in `DynamicLayer`
    values: Any
    _rooms: tuple[PreallocatedBuffer, PreallocatedBuffer] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or not (_continues(self.keys, key_states) and _continues(self.values, value_states)):
            self._rooms = None
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *more, **named)
            return updated
        keys_room, values_room = self._rooms = self._rooms or (PreallocatedBuffer(), PreallocatedBuffer())
        self.keys, self.values = keys_room.append(self.keys, key_states), values_room.append(self.values, value_states)
        return self.keys, self.values

    def crop(self, *args: Any, **named: Any) -> None:
        keys, values = self.keys, self.values
        super().crop(*args, **named)
        for room, before, after in zip(self._rooms or (), (keys, values), (self.keys, self.values), strict=False):
            if room.filled is before:
                room.filled = after


def _continues(held: Tensor | None, new: Tensor) -> bool:
    """Whether `new` can be written behind `held` as it is. No tokens yet, other dtypes and mistakes are left to `torch.cat`."""
    if held is None or not held.dim() == new.dim() == 4 or held.dtype is not new.dtype or held.device != new.device:
        return False
    batch, heads, _, width = held.shape
    return (batch, heads, new.shape[2], width) == new.shape


def _roomy(held: Tensor, total: int) -> Tensor:
    """A larger tensor that begins with `held`."""
    length = total + max(_LEAST_SPARE, total // _SPARE_SHARE)
    with torch.inference_mode(False):  # a tensor of inference mode could not be written outside of it
        room = torch.empty(*held.shape[:2], length, held.shape[3], dtype=held.dtype, device=held.device)
    room[:, :, : held.shape[2]] = held
    return room
