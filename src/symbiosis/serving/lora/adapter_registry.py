"""Which adapter a name means now, and who still needs which. Pure bookkeeping.

A name means a version: the hash of a content, and a generation that grows with every load. A request is given the
hash when it is accepted and keeps it: whoever loads something else under the name afterwards changes nothing for it.
Generations tell versions apart for people; nothing is computed by them, since equal content is equal.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from symbiosis.errors import UnknownAdapter
from symbiosis.serving.lora.adapter_loader import Place

_MAX_PLACES = 8


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """What a name means."""

    hash: str
    generation: int


@dataclass(slots=True, eq=False)
class AdapterRecord:
    """One content, whatever its names."""

    hash: str
    size: int
    """Bytes it takes in memory."""
    virtual: int
    """Tokens it puts in front of every prompt."""
    places: list[Place] = field(default_factory=list)
    """Where it was read from and may be read again, the latest first; itself only if there is no folder."""
    names: set[str] = field(default_factory=set)
    users: int = 0
    """Requests that have not ended."""
    broken: str | None = None
    """Why it cannot be read any more; None: as far as is known, it can."""


class AdapterRegistry:
    """Names, versions, records. A record is there as long as a name or a request needs it."""

    def __init__(self) -> None:
        self._versions: dict[str, AdapterVersion] = {}
        self._records: dict[str, AdapterRecord] = {}
        self._pinned: set[str] = set()
        self._generations = itertools.count(1)

    @property
    def versions(self) -> dict[str, AdapterVersion]:
        return dict(self._versions)

    def __len__(self) -> int:
        return len(self._records)

    def version(self, name: str) -> AdapterVersion:
        """Raises `UnknownAdapter`."""
        if name not in self._versions:
            known = sorted(self._versions)[:20]
            more = f" and {len(self._versions) - 20} more" if len(self._versions) > 20 else ""
            there = f"there are {', '.join(known)}{more}" if known else "none is loaded"
            raise UnknownAdapter(f"there is no adapter {name!r}: {there}")
        return self._versions[name]

    def get(self, hash: str) -> AdapterRecord | None:
        return self._records.get(hash)

    def put(self, name: str, hash: str, size: int, virtual: int, place: Place) -> tuple[AdapterVersion, AdapterRecord | None]:
        """The name's new version; and the record that nobody needs any more because of it."""
        older = self._versions.get(name)
        record = self._records.setdefault(hash, AdapterRecord(hash, size, virtual))
        if isinstance(place, Path):
            folders: list[Place] = [each for each in record.places if isinstance(each, Path) and each != place]
            record.places = [place, *folders][:_MAX_PLACES]
        elif not record.places:
            record.places = [place]
        record.names.add(name)
        record.broken = None
        self._versions[name] = AdapterVersion(hash, next(self._generations))
        gone = None
        if older is not None and older.hash != hash:
            self._records[older.hash].names.discard(name)
            gone = self._gone(older.hash)
        return self._versions[name], gone

    def remove(self, name: str) -> AdapterRecord | None:
        """Nobody new gets it. The record that nobody needs any more, if so. Raises `UnknownAdapter`."""
        hash = self.version(name).hash
        del self._versions[name]
        self._pinned.discard(name)
        self._records[hash].names.discard(name)
        return self._gone(hash)

    def hold(self, hash: str, count: int = 1) -> None:
        """So many requests need it."""
        self._records[hash].users += count

    def release(self, hash: str) -> AdapterRecord | None:
        """A request has ended. The record that nobody needs any more, if so."""
        self._records[hash].users -= 1
        return self._gone(hash)

    def pin(self, name: str, pinned: bool) -> None:
        """Raises `UnknownAdapter`. A pin is the name's: what is loaded under it later has it too."""
        self.version(name)
        (self._pinned.add if pinned else self._pinned.discard)(name)

    @property
    def pinned(self) -> frozenset[str]:
        """Names."""
        return frozenset(self._pinned)

    def is_pinned(self, hash: str) -> bool:
        record = self._records.get(hash)
        return record is not None and not self._pinned.isdisjoint(record.names)

    def _gone(self, hash: str) -> AdapterRecord | None:
        record = self._records[hash]
        if record.names or record.users:
            return None
        return self._records.pop(hash)
