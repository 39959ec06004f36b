"""The manifest of a model in a zoo: the chain of its blocks, its other files, and where it came from."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from symbiosis.zoo.errors import BadZoo
from symbiosis.zoo.partition import BlockKind, BlockPlace

FORMAT = 1
DIFFERENCE = "low-rank difference"
"""The verdict in the provenance of a full fine-tune that is stored as an adapter."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A file of the zoo, by the hash of its content."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block at its place in the chain of a model."""

    place: BlockPlace
    object: StoredObject


@dataclass(frozen=True, slots=True)
class StoredSurrogate:
    """A smaller block that stands in for blocks of the chain (`surrogate`)."""

    object: StoredObject
    stands_for: tuple[str, ...]
    """Hashes of those blocks."""
    figures: dict[str, float]
    """What was measured when it was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelManifest:
    name: str
    chain: tuple[ChainBlock, ...]
    files: dict[str, StoredObject]
    """Config and tokenizer, by name."""
    adapter: dict[str, StoredObject] = field(default_factory=dict)
    """The files of a PEFT adapter on the chain, if it has one."""
    provenance: dict[str, str] = field(default_factory=dict)
    surrogates: dict[str, StoredSurrogate] = field(default_factory=dict)
    """By what they stand for, such as `ffn 12`."""

    @property
    def is_difference(self) -> bool:
        """Whether the adapter stands for a full fine-tune, as a low-rank difference."""
        return bool(self.adapter) and self.provenance.get("verdict") == DIFFERENCE

    @property
    def objects(self) -> list[StoredObject]:
        """All, in the order of the chain; an object may be there several times."""
        surrogates = [each.object for each in self.surrogates.values()]
        return [each.object for each in self.chain] + [*self.files.values(), *self.adapter.values(), *surrogates]

    @property
    def size(self) -> int:
        """Bytes of the whole model, as a copy of its own."""
        return sum(each.size for each in self.objects)

    def encode(self) -> bytes:
        chain = [[str(each.place.kind), each.place.layer, each.object.sha256, each.object.size] for each in self.chain]
        files, adapter = ({name: asdict(each) for name, each in part.items()} for part in (self.files, self.adapter))
        content = {"format": FORMAT, "name": self.name, "chain": chain, "files": files, "adapter": adapter}
        surrogates = {name: asdict(each) for name, each in self.surrogates.items()}
        return json.dumps({**content, "provenance": self.provenance, "surrogates": surrogates}, indent=1).encode()

    @staticmethod
    def decode(raw: bytes, name: str) -> ModelManifest:
        """Raises `BadZoo`."""
        try:
            found = json.loads(raw)
            if found["format"] != FORMAT or found["name"] != name:
                raise ValueError
            chain = tuple(
                ChainBlock(BlockPlace(BlockKind(kind), _count(layer, MAX_LAYERS)), _object(sha256, size))
                for kind, layer, sha256, size in found["chain"]
            )
            files, adapter = (_files(found[part]) for part in ("files", "adapter"))
            provenance = {str(key)[:100]: str(value)[:1000] for key, value in found["provenance"].items()}
            surrogates = {str(key)[:100]: _surrogate(each) for key, each in found.get("surrogates", {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadZoo(f"the manifest of {name} cannot be read: expected one that `symbiosis zoo add` wrote") from None
        return ModelManifest(name=name, chain=chain, files=files, adapter=adapter, provenance=provenance, surrogates=surrogates)


def _files(found: dict[str, dict[str, object]]) -> dict[str, StoredObject]:
    if any(_FILE.fullmatch(name) is None for name in found):
        raise ValueError
    return {name: _object(each["sha256"], each["size"]) for name, each in found.items()}


def _surrogate(found: dict[str, Any]) -> StoredSurrogate:
    stands_for = tuple(str(each)[:64] for each in found["stands_for"])
    figures = {str(key)[:100]: float(value) for key, value in found["figures"].items()}
    return StoredSurrogate(_object(found["object"]["sha256"], found["object"]["size"]), stands_for, figures)


def _object(sha256: object, size: object) -> StoredObject:
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise ValueError
    return StoredObject(sha256, _count(size, 1 << 50))


def _count(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError
    return value
