"""Replacements of attention in transformers' registry, and the features they reject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from symbiosis.errors import SymbiosisError

Attend: TypeAlias = Callable[[nn.Module, int, tuple[Tensor, Tensor, Tensor], float, int | None, float | None], Tensor]
"""Result of (module, layer, queries, keys and values by heads, scale, window, softcap)."""

_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask")  # other arguments do not change the result of attention


def unsupported_feature(module: nn.Module, mask: Tensor | None, window: int | None, more: Mapping[str, Any]) -> str | None:
    """The feature that this module needs and plain causal attention lacks; None if it needs none."""
    unsupported = [name for name in _UNSUPPORTED if more.get(name) is not None]
    if unsupported or mask is not None:
        return f"{type(module).__name__} calls its attention with {unsupported or 'a mask'}"
    if window is None and _has_partial_attention(module):
        return f"{type(module).__name__} applies its window by its mask"
    if getattr(module, "attn_temperature_tuning", False):  # by rows of the batch, not by positions of the sequence
        return f"{type(module).__name__} scales its queries by their rows (attn_temperature_tuning)"
    return None


def register_attention(name: str, attend: Attend, error: type[SymbiosisError]) -> None:
    """Register causal attention over one row of packed tokens. Modules that need more raise `error`."""

    def attention(
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
        reason = unsupported_feature(module, attention_mask, sliding_window, more)
        if reason is None and query.shape[0] != 1:
            reason = f"{type(module).__name__} calls its attention with several sequences"
        if reason is not None:
            raise error(f"{reason}, which packed rows do not support")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        return attend(module, layer, (query[0], key[0], value[0]), scale, sliding_window, softcap)[None], None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)  # the function itself applies causality


def _has_partial_attention(module: nn.Module) -> bool:
    """Whether the config restricts this layer to some of the earlier tokens (a window, chunks, an index)."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[int(module.layer_idx)] != "full_attention")  # type: ignore[arg-type]
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
