"""Dicts with tenant-controlled keys stay bounded, so that no tenant can grow memory."""

from __future__ import annotations

from typing import Any


def evict_oldest(entries: dict[Any, Any], max_entries: int) -> None:
    """Evict in insertion order until one more entry fits. Reinserting an entry makes it the newest."""
    while len(entries) >= max_entries:
        del entries[next(iter(entries))]
