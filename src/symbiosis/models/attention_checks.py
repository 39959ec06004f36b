"""What a model may ask of an attention function that stands in transformers' registry in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_STRANGE = ("s_aux", "sinks", "position_bias", "head_mask")  # other settings than these do not change what attention computes


def unsupported_reason(
    module: nn.Module, query: Tensor, mask: Tensor | None, window: int | None, more: Mapping[str, Any]
) -> str | None:
    """What this module asks for that plain causal attention over rows does not have; None if nothing."""
    strange = [name for name in _STRANGE if more.get(name) is not None]
    if strange or mask is not None or query.shape[0] != 1:
        return f"{type(module).__name__} asks its attention for {strange or 'a mask'}"
    if window is None and _looks_at_some(module):
        return f"{type(module).__name__} keeps its window to its mask"
    if getattr(module, "attn_temperature_tuning", False):  # by rows of the pass, not by positions of the sequence
        return f"{type(module).__name__} scales its queries by their rows (attn_temperature_tuning)"
    return None


def no_mask(*_: Any, **__: Any) -> None:
    """For transformers' registry of masks: the attention function knows by itself where a row may look."""


def _looks_at_some(module: nn.Module) -> bool:
    """Whether this layer should not look at all tokens before (a window, chunks, an index), as its config says."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[int(module.layer_idx)] != "full_attention")  # type: ignore[arg-type]
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
