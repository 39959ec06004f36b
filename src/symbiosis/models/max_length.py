"""How long a sequence may be that is computed together with others."""

from __future__ import annotations

from typing import Any


def max_sequence_length(config: Any) -> int:
    """Most tokens of a sequence.

    Some rotary positions change for all rows of a pass as soon as one of them is beyond the length the model was
    first trained for: nobody gets there, or what others see would depend on it.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = str(each.get("rope_type") or each.get("type") or "")
        if kind == "longrope" or "dynamic" in kind:
            first = each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(first or longest))
    return longest
