"""The attention function of a model whose KV cache is in host memory.

One token for each sequence on a CPU is decode: the kernel reads the cache in place. Anything else is a prefill chunk: it
attends to itself, and to the earlier tokens in segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from symbiosis.errors import CannotOffload
from symbiosis.kernels.cpu import flash_decoding
from symbiosis.models.attention_registry import unsupported_feature
from symbiosis.split.client.long_context.host_cache import HostCacheLayer
from symbiosis.split.client.long_context.partial_attention import PartialAttention, attend_segment

NAME = "symbiosis_host_kv"


def register_host_attention() -> None:
    AttentionInterface.register(NAME, attend_host)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # causality and padding are the function's


def attend_host(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention over the layer that `key` is a view of: [B, R, H, D]."""
    reason = unsupported_feature(module, attention_mask, sliding_window, more)
    if reason is not None:
        raise CannotOffload(f"{reason}, which a KV cache in host memory does not support: use kv='device'")
    layer: HostCacheLayer | None = getattr(key, "symbiosis_layer", None)
    if layer is None:
        raise CannotOffload(f"{type(module).__name__} changes keys after it has stored them: use kv='device'")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.window = sliding_window
    if query.shape[2] == 1 and query.device.type == "cpu":
        out = flash_decoding.attend(query[:, :, 0], layer.range(sliding_window), scale=scale, cap=softcap)
        return out[:, None], None
    return _attend_chunk(query, layer, scale, sliding_window, softcap).transpose(1, 2), None


def _attend_chunk(q_BHRD: Tensor, layer: HostCacheLayer, scale: float, window: int | None, cap: float | None) -> Tensor:
    """Attention of the tokens stored last: to each other, and to all before them."""
    rows, before = q_BHRD.shape[2], layer.length - q_BHRD.shape[2]
    keys, values = layer.take_fresh(before, q_BHRD)
    masks = _Masks(layer.cache.starts_of(len(q_BHRD)), before, rows, window, q_BHRD.device)
    allowed = masks.allowed(before, layer.length)
    found: PartialAttention = attend_segment(q_BHRD, keys, values, scale=scale, cap=cap, allowed_BRS=allowed, causal=True)
    for start, end, k, v in layer.segments(before, q_BHRD.device, q_BHRD.dtype):
        part = attend_segment(q_BHRD, k, v, scale=scale, cap=cap, allowed_BRS=masks.allowed(start, end))
        found = found.combine(part)
    return found.out_BHRD.to(q_BHRD.dtype)


class _Masks:
    """Padding and window of a chunk's rows, by segments."""

    def __init__(self, starts: list[int], before: int, rows: int, window: int | None, device: torch.device) -> None:
        self._starts, self._before, self._rows, self._window, self._device = starts, before, rows, window, device

    def allowed(self, start: int, end: int) -> Tensor | None:
        """[B or 1, R, S]; None if every row attends to the whole segment, causality aside."""
        padded = any(first > start for first in self._starts)
        is_cut = self._window is not None and self._before + self._rows - self._window > start
        if not padded and not is_cut:
            return None
        tokens = torch.arange(start, end, device=self._device)
        allowed = torch.ones(1, self._rows, end - start, dtype=torch.bool, device=self._device)
        if self._window is not None:
            rows = torch.arange(self._before, self._before + self._rows, device=self._device)
            allowed = allowed & (tokens[None, :] > rows[:, None] - self._window)[None]
        if padded:
            allowed = allowed & (tokens[None, :] >= torch.tensor(self._starts, device=self._device)[:, None])[:, None]
        return allowed
