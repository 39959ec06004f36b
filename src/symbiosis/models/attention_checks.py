"""Features of attention that a replacement in transformers' registry must have or reject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask")  # other arguments do not change the result of attention


def unsupported_reason(
    module: nn.Module, query: Tensor, mask: Tensor | None, window: int | None, more: Mapping[str, Any]
) -> str | None:
    """The feature that this module needs and plain causal attention over rows lacks; None if it needs none."""
    unsupported = [name for name in _UNSUPPORTED if more.get(name) is not None]
    if unsupported or mask is not None or query.shape[0] != 1:
        return f"{type(module).__name__} calls its attention with {unsupported or 'a mask'}"
    if window is None and _has_partial_attention(module):
        return f"{type(module).__name__} applies its window by its mask"
    if getattr(module, "attn_temperature_tuning", False):  # by rows of the batch, not by positions of the sequence
        return f"{type(module).__name__} scales its queries by their rows (attn_temperature_tuning)"
    return None


def no_mask(*_: Any, **__: Any) -> None:
    """For transformers' registry of masks: the attention function itself applies causality."""


def _has_partial_attention(module: nn.Module) -> bool:
    """Whether the config restricts this layer to some of the earlier tokens (a window, chunks, an index)."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[int(module.layer_idx)] != "full_attention")  # type: ignore[arg-type]
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
