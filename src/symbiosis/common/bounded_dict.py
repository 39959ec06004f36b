"""What is remembered of tenants' words has a bound: they can say as many things as they like."""

from __future__ import annotations

from typing import Any


def evict_oldest(kept: dict[Any, Any], most: int) -> None:
    """Room for one more, so that there are at most so many. What is put in again is young."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
