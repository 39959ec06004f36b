"""The longest sequence that can share a batch with others."""

from __future__ import annotations

from typing import Any


def max_sequence_length(config: Any) -> int:
    """The maximum number of tokens of a sequence.

    Some rotary embeddings change for all rows of a batch once one position exceeds the original training length. The limit
    excludes such positions, so that no sequence depends on the others in its batch.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = str(each.get("rope_type") or each.get("type") or "")
        if kind == "longrope" or "dynamic" in kind:
            original = each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit
