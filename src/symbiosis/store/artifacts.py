"""Artifacts of a cluster: adapters, data sets and checkpoints. An artifact is a few files that appear together.

store.json                                    which cluster the store belongs to
adapters/ID/                                  an adapter; label.json has its owner and its name, and is written last
jobs/JOB/data/, jobs/JOB/try-E/step-N/        data sets and checkpoints of a job

Each folder has a manifest with the size and the hash of each file. It is written after them: without it there is no artifact.
IDs are chosen by the server. A tenant's names are contents of files, never names.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import BadArtifact, StoreUnavailable
from symbiosis.store.object_store import PART_BYTES, ObjectStore

ADAPTERS, JOBS = "adapters", "jobs"
MANIFEST = "manifest.json"
MAX_FILE_BYTES = 8 << 30
_LABEL = "label.json"
_STORE = "store.json"
_FORMAT = 1
_MAX_JSON_BYTES = 64 << 10
_ID = r"[A-Za-z0-9][A-Za-z0-9-]{0,99}"
_NAME = re.compile(rf"{ADAPTERS}/{_ID}|{JOBS}/{_ID}/data|{JOBS}/{_ID}/{_ID}/{_ID}")
_FOLDER = re.compile(rf"(?:{ADAPTERS}|{JOBS})(?:/{_ID}){{1,3}}")
_FILE = re.compile(r"[a-z][a-z_]{0,60}\.(?:json|safetensors)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_name(name: str) -> str:
    """Raises `BadArtifact` unless it is the name of an artifact."""
    if _NAME.fullmatch(name) is None:
        raise BadArtifact(f"{name!r:.80} is not the name of an artifact")
    return name


def check_folder(name: str) -> str:
    """Raises `BadArtifact` unless it is the name of an artifact, or of the folder of several."""
    if _FOLDER.fullmatch(name) is None:
        raise BadArtifact(f"{name!r:.80} is not the name of artifacts")
    return name


def check_file(file: str) -> str:
    """Raises `BadArtifact` unless a file of an artifact may have this name."""
    if _FILE.fullmatch(file) is None or file in (MANIFEST, _LABEL):
        raise BadArtifact(f"{file!r:.80} is not the name of a file of an artifact")
    return file


@dataclass(frozen=True, slots=True)
class StoredFile:
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of an artifact by name."""

    files: dict[str, StoredFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        return json.dumps({name: [file.sha256, file.bytes] for name, file in self.files.items()}).encode()

    @staticmethod
    def decode(raw: bytes) -> Manifest:
        """Raises `BadArtifact`."""
        files: dict[str, StoredFile] = {}
        try:
            for name, (sha256, size) in json.loads(raw).items():
                if not _SHA256.fullmatch(sha256) or type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
                    raise ValueError
                files[check_file(name)] = StoredFile(sha256, size)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise BadArtifact(f"a {MANIFEST} of the store cannot be read: expected sizes and hashes of files") from None
        return Manifest(files)


class ArtifactStore:
    """Thread-safe. Methods raise `StoreUnavailable`; those that write also `StoreFull`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def claim(self, cluster: str) -> None:
        """Make it the store of this cluster. Raises `StoreUnavailable` if it belongs to another, or has other content."""
        if self._read_json(_STORE) is None:
            if self._objects.list(ADAPTERS) or self._objects.list(JOBS):
                raise StoreUnavailable(
                    f"the store has folders {ADAPTERS} or {JOBS}, but no {_STORE}: expected an empty folder or prefix"
                )
            self._objects.write(_STORE, json.dumps({"format": _FORMAT, "cluster": cluster}).encode())
        self.check(cluster)

    def check(self, cluster: str) -> None:
        """Write, read and remove a probe. Raises `StoreUnavailable` if the store is not this cluster's, or cannot be used."""
        found = self._read_json(_STORE)
        if found is None:
            raise StoreUnavailable(
                f"the store has no {_STORE}: expected the one of `symbiosis cluster up`; a shared folder must be mounted here"
            )
        if found != {"format": _FORMAT, "cluster": cluster}:
            raise StoreUnavailable(
                "the store belongs to another cluster: expected one with the same secret file. Choose another store, or remove "
                f"its {_STORE}"
            )
        name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
        self._objects.write(name, content)
        try:
            if b"".join(self._objects.read(name, len(content))) != content:
                raise StoreUnavailable("the store returns other content than was written: expected a store that works")
        except FileNotFoundError:
            raise StoreUnavailable("the store does not have what was just written: expected a store that works") from None
        finally:
            self._objects.remove(name)

    # Artifacts

    def has(self, name: str) -> bool:
        return self._objects.exists(f"{check_name(name)}/{MANIFEST}")

    def put(self, name: str, folder: Path, files: Iterable[str] | None = None) -> Manifest:
        """Store the files of a local folder; by default all of them. On a failure nothing of it is left, if possible."""
        chosen = sorted(path.name for path in folder.iterdir()) if files is None else list(files)
        manifest = Manifest({check_file(file): _describe(folder / file) for file in chosen})
        check_name(name)
        try:
            for file in chosen:
                self._objects.write(f"{name}/{file}", folder / file)
            self._objects.write(f"{name}/{MANIFEST}", manifest.encode())
        except BaseException:
            with suppress(StoreUnavailable):
                self.remove(name)
            raise
        return manifest

    def manifest(self, name: str) -> Manifest:
        """Raises `BadArtifact` if there is none."""
        raw = self._read(f"{check_name(name)}/{MANIFEST}")
        if raw is None:
            raise BadArtifact(f"the store does not have {name}: it was removed, or never complete")
        return Manifest.decode(raw)

    def fetch(self, name: str, folder: Path) -> Manifest:
        """Read an artifact into a new local folder. Raises `BadArtifact` if its content is not what was written."""
        manifest = self.manifest(name)
        folder.mkdir()
        for file, expected in manifest.files.items():
            digest, size = hashlib.sha256(), 0
            with (folder / file).open("xb") as target:
                try:
                    for part in self._objects.read(f"{name}/{file}", expected.bytes):
                        target.write(part)
                        digest.update(part)
                        size += len(part)
                except FileNotFoundError:
                    raise BadArtifact(f"the store has no {name}/{file}: expected {expected.bytes} bytes") from None
            if (digest.hexdigest(), size) != (expected.sha256, expected.bytes):
                raise BadArtifact(
                    f"{name}/{file} of the store is corrupt: expected {expected.bytes} bytes with the hash "
                    f"{expected.sha256[:12]}, found {size} with {digest.hexdigest()[:12]}. Upload or train it again"
                )
        return manifest

    def remove(self, name: str) -> None:
        """An artifact, or all artifacts of a job."""
        check_folder(name)
        for file in (_LABEL, MANIFEST):  # first: what is half removed is no artifact
            self._objects.remove(f"{name}/{file}")
        self._objects.remove(name)

    def list_ids(self, kind: str) -> set[str]:
        """IDs of all adapters, or of all jobs, that have any object."""
        parts = [name.split("/") for name in self._objects.list(kind)]
        return {each[1] for each in parts if len(each) > 2 and re.fullmatch(_ID, each[1])}

    def list_artifacts(self, folder: str) -> list[str]:
        """Names of complete artifacts below a folder."""
        found = [name.removesuffix(f"/{MANIFEST}") for name in self._objects.list(folder) if name.endswith(f"/{MANIFEST}")]
        return [name for name in found if _NAME.fullmatch(name)]

    # Labels

    def label(self, name: str, content: Mapping[str, Any]) -> None:
        """Say what an artifact is. Unlabelled adapters are garbage."""
        self._objects.write(f"{check_name(name)}/{_LABEL}", json.dumps(content).encode())

    def labels(self, kind: str) -> dict[str, dict[str, Any]]:
        """By artifact name; unreadable ones are left out."""
        names = [name.removesuffix(f"/{_LABEL}") for name in self._objects.list(kind) if name.endswith(f"/{_LABEL}")]
        found = ((name, self._read_json(f"{name}/{_LABEL}")) for name in names if _NAME.fullmatch(name))
        return {name: content for name, content in found if content is not None}

    def _read_json(self, name: str) -> dict[str, Any] | None:
        """None if there is no such object, or no JSON object in it."""
        raw = self._read(name)
        with suppress(ValueError, RecursionError):
            found = json.loads(raw or b"")
            return found if isinstance(found, dict) else None
        return None

    def _read(self, name: str) -> bytes | None:
        try:
            return b"".join(self._objects.read(name, _MAX_JSON_BYTES))
        except FileNotFoundError:
            return None


def _describe(path: Path) -> StoredFile:
    """Raises `BadArtifact` if the file is too large."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            digest.update(part)
            size += len(part)
            if size > MAX_FILE_BYTES:
                raise BadArtifact(f"{path.name} has more than the {MAX_FILE_BYTES} bytes allowed")
    return StoredFile(digest.hexdigest(), size)
