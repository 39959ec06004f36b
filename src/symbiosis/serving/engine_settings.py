"""Settings of an engine core that no config checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from symbiosis.errors import OutOfRange
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.scheduling.scheduler import SchedulerConfig
from symbiosis.serving.scheduling.sequence import check_range

_SCHEDULER_SETTINGS = sorted({each.name for each in fields(SchedulerConfig)} - {"vocab_size", "max_length", "max_adapters"})


def check_settings(pages: Any, page_size: Any, cache_bytes: Any, residency: Any, limits: Iterable[str]) -> None:
    """Check the settings of an `EngineCore` that no config checks. Raises `OutOfRange`."""
    for name in limits:
        if name not in _SCHEDULER_SETTINGS:
            expected = f"pages, page_size, cache_bytes, host_cache_bytes, residency, {', '.join(_SCHEDULER_SETTINGS)}"
            raise OutOfRange(f"{name!r} is no setting of the engine", field=name, expected=f"some of {expected}")
    check_range("pages", pages, 1, 1 << 31, integer=True)
    check_range("page_size", page_size, 1, 1 << 16, integer=True)
    if cache_bytes is not None:
        check_range("cache_bytes", cache_bytes, 0, 1 << 50, integer=True)
    if not isinstance(residency, AdapterCacheConfig):
        raise OutOfRange(f"residency is {residency!r:.80}", field="residency", expected="an AdapterCacheConfig")
