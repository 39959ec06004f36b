"""How much each tenant may ask: so many requests at once, so many in a minute. Who asks for more is told when to come again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from symbiosis.errors import SymbiosisError, TooManyRequests


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Of each tenant, the admin too. None: no limit but the engine's own."""

    at_once: int | None = None
    """Completions, chats and texts to tokenize that have not ended."""
    per_minute: int | None = None
    """Of the same begun; as many may come in one go after a minute's rest."""

    def __post_init__(self) -> None:
        for name in ("at_once", "per_minute"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 31:
                raise SymbiosisError(f"requests {name.replace('_', ' ')}: {value}, expected 1 or more")


class RateLimiter:
    """Counts for one server."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._running: Counter[str] = Counter()
        self._left: dict[str, tuple[float, float]] = {}  # requests a tenant may still make, and when that was so

    @contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """One request from its beginning to its end. Raises `TooManyRequests`, which says when to try again."""
        most = self._limits.at_once
        if most is not None and self._running[tenant] >= most:
            raise TooManyRequests(f"{most} requests of yours are under way, and no more may be at once. Try again later")
        self._spend(tenant)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def _spend(self, tenant: str) -> None:
        most, now = self._limits.per_minute, self._clock()
        if most is None:
            return
        left, then = self._left.get(tenant, (float(most), now))
        left = min(float(most), left + (now - then) * most / 60)
        if left < 1:
            raise TooManyRequests(
                f"you may make {most} requests in a minute, and have. Try again later", retry_s=(1 - left) * 60 / most
            )
        self._left[tenant] = (left - 1, now)
