"""Rate limits per tenant: concurrent requests, and requests per minute as a token bucket.

Imports no web framework: the engine process, which all HTTP processes ask, owns the limiter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from symbiosis.errors import SymbiosisError, TooManyRequests


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Limits of each tenant, the admin included. None: only the engine's own limits apply."""

    at_once: int | None = None
    """Concurrent completions, chats and tokenizations."""
    per_minute: int | None = None
    """Requests per minute; also the size of a burst."""

    @property
    def is_unlimited(self) -> bool:
        return self.at_once is None and self.per_minute is None

    def __post_init__(self) -> None:
        for name in ("at_once", "per_minute"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 31:
                raise SymbiosisError(f"requests {name.replace('_', ' ')}: {value}, expected 1 or more")


class RateLimiter:
    """One per server, whatever the number of its HTTP processes."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left and the time of the last update

    def acquire(self, tenant: str) -> None:
        """Take one request's place until `release`. Raises `TooManyRequests` with the time to retry."""
        most = self._limits.at_once
        if most is not None and self._running[tenant] >= most:
            raise TooManyRequests(f"{most} requests in progress, at most {most} allowed at once. Try again later")
        self._take_from_bucket(tenant)
        self._running[tenant] += 1

    def release(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _take_from_bucket(self, tenant: str) -> None:
        size, now = self._limits.per_minute, self._clock()
        if size is None:
            return
        left, updated = self._buckets.get(tenant, (float(size), now))
        left = min(float(size), left + (now - updated) * size / 60)
        if left < 1:
            retry_s = (1 - left) * 60 / size
            raise TooManyRequests(f"at most {size} requests allowed in a minute. Try again later", retry_s=retry_s)
        self._buckets[tenant] = (left - 1, now)
