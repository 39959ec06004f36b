"""Whose job is next: the tenant's that has fewest running, then the one's who has waited longest for a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from symbiosis.errors import SymbiosisError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """What the provider allows."""

    running: int = 8
    tenant_running: int = 4
    tenant_open: int = 100
    """Jobs of one tenant that have not ended."""
    tenant_files: int = 1000
    file_bytes: int = 128 << 20
    tenant_bytes: int = 1 << 30
    """All files of one tenant together."""
    examples: int = 1_000_000
    tokens: int = 50_000_000
    """Of one file."""
    steps: int = 100_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1 << 40:
                raise SymbiosisError(f"jobs: {name.replace('_', ' ')} is {value!r}, expected a whole number from 1 on")


@dataclass(frozen=True, slots=True)
class Waiting:
    id: str
    tenant: str


def order(waiting: Sequence[Waiting], running: Mapping[str, int], last: Mapping[str, int]) -> list[Waiting]:
    """The order in which jobs would start if none ended and none came. `waiting` is oldest first.

    `last`: when a tenant's last job was started, by any growing number.
    """
    counts, started = Counter(running), dict(last)
    left: dict[str, list[Waiting]] = {}
    for each in waiting:
        left.setdefault(each.tenant, []).append(each)
    found: list[Waiting] = []
    now = max(started.values(), default=0)
    while left:
        tenant = min(left, key=lambda name: (counts[name], started.get(name, -1)))
        found.append(left[tenant].pop(0))
        if not left[tenant]:
            del left[tenant]
        counts[tenant] += 1
        now += 1
        started[tenant] = now
    return found


def startable(ordered: Sequence[Waiting], running: Mapping[str, int], limits: JobLimits) -> list[Waiting]:
    """Those that may start now."""
    counts, found = Counter(running), list[Waiting]()
    for each in ordered:
        if counts.total() < limits.running and counts[each.tenant] < limits.tenant_running:
            counts[each.tenant] += 1
            found.append(each)
    return found
