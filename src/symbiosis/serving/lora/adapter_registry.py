"""Names, versions and reference counts of adapters. It only does bookkeeping.

A name refers to a version: a content hash and a generation that increases with every registration. A request keeps the
hash it was accepted with, so a later registration under the same name does not affect it.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from symbiosis.errors import UnknownAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter

_MAX_SOURCES = 8
_MAX_LISTED = 20  # names in an error message

Source: TypeAlias = Path | PackedAdapter
"""An adapter's folder, or the adapter itself if no folder has it."""


def on_chain(adapter_hash: str, chain: str) -> str:
    """The hash of an adapter on a chain: its weights in the engine's form may depend on those of the model."""
    return hashlib.sha256(f"{chain}:{adapter_hash}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """A checked adapter without a name."""

    packed: PackedAdapter
    source: Source
    chain: str = ""
    """Hash of the chain that it was prepared for; empty: the engine has one model."""

    @property
    def hash(self) -> str:
        return self.packed.adapter.hash


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """What a name refers to."""

    hash: str
    generation: int


@dataclass(slots=True, eq=False)
class AdapterRecord:
    """One content hash, under any number of names."""

    hash: str
    nbytes: int
    virtual_tokens: int
    """Tokens before every prompt."""
    chain: str = ""
    """Hash of its chain; empty: the engine has one model."""
    sources: list[Source] = field(default_factory=list)
    """Where the adapter can be read again, latest first."""
    names: set[str] = field(default_factory=set)
    num_requests: int = 0
    """Requests that have not ended."""
    error: str | None = None
    """Why the last read failed; None if it did not."""


class AdapterRegistry:
    """Names, versions, records. A record exists while a name or a request refers to it."""

    def __init__(self) -> None:
        self._versions: dict[str, AdapterVersion] = {}
        self._records: dict[str, AdapterRecord] = {}
        self._pinned: set[str] = set()
        self._generations = itertools.count(1)

    @property
    def versions(self) -> dict[str, AdapterVersion]:
        return dict(self._versions)

    @property
    def pinned(self) -> frozenset[str]:
        """Names."""
        return frozenset(self._pinned)

    def __len__(self) -> int:
        return len(self._records)

    def version(self, name: str) -> AdapterVersion:
        """Raises `UnknownAdapter`."""
        if name not in self._versions:
            names = sorted(self._versions)
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            known = f"loaded adapters are {', '.join(names[:_MAX_LISTED])}{more}" if names else "none is loaded"
            raise UnknownAdapter(f"there is no adapter {name!r}: {known}")
        return self._versions[name]

    def get(self, hash: str) -> AdapterRecord | None:
        return self._records.get(hash)

    def register(self, name: str, prepared: PreparedAdapter) -> tuple[AdapterVersion, AdapterRecord | None]:
        """The name's new version, and the record that is unreferenced now, if any."""
        hash, source, adapter = prepared.hash, prepared.source, prepared.packed.adapter
        older = self._versions.get(name)
        virtual_tokens = adapter.virtual.count if adapter.virtual else 0
        record = self._records.setdefault(hash, AdapterRecord(hash, prepared.packed.nbytes, virtual_tokens, prepared.chain))
        if isinstance(source, Path):
            folders: list[Source] = [each for each in record.sources if isinstance(each, Path) and each != source]
            record.sources = [source, *folders][:_MAX_SOURCES]
        elif not record.sources:
            record.sources = [source]
        record.names.add(name)
        record.error = None
        self._versions[name] = AdapterVersion(hash, next(self._generations))
        unused = None
        if older is not None and older.hash != hash:
            self._records[older.hash].names.discard(name)
            unused = self._pop_unreferenced(older.hash)
        return self._versions[name], unused

    def unregister(self, name: str) -> AdapterRecord | None:
        """Remove a name. Returns the record if it is unreferenced now. Raises `UnknownAdapter`."""
        hash = self.version(name).hash
        del self._versions[name]
        self._pinned.discard(name)
        self._records[hash].names.discard(name)
        return self._pop_unreferenced(hash)

    def acquire(self, hash: str, requests: int) -> None:
        """Count new requests."""
        self._records[hash].num_requests += requests

    def release(self, hash: str) -> AdapterRecord | None:
        """Count the end of a request. Returns the record if it is unreferenced now."""
        self._records[hash].num_requests -= 1
        return self._pop_unreferenced(hash)

    def pin(self, name: str, pinned: bool) -> None:
        """Pin a name: later versions under it are pinned, too. Raises `UnknownAdapter`."""
        self.version(name)
        (self._pinned.add if pinned else self._pinned.discard)(name)

    def is_pinned(self, hash: str) -> bool:
        record = self._records.get(hash)
        return record is not None and not self._pinned.isdisjoint(record.names)

    def _pop_unreferenced(self, hash: str) -> AdapterRecord | None:
        record = self._records[hash]
        return None if record.names or record.num_requests else self._records.pop(hash)
