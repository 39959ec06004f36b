"""Uploaded adapters on disk: a folder each, under a name of ours, with the two files of PEFT and a note of whose it is.

The note is written last, once the engine serves the adapter: a folder without
one is left over from an upload that did not come to its end, and is removed at
the next start of either process. Needs no web framework: the engine's process reads it at its start.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.errors import QuotaExceeded, SymbiosisError, TooManyRequests

NOTE = "served.json"
FIELDS = {"config": CONFIG, "weights": TENSORS}
"""The fields of an upload and the files they become."""
_AT_ONCE = 2  # uploads of one owner


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """Of each owner: a tenant, or the admin, whose adapters are for everybody."""

    adapters: int = 64
    bytes: int = 4 << 30
    """All of its adapters together."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    owner: str | None
    name: str
    folder: Path
    bytes: int


def lock(folder: Path, what: str = "adapters", option: str = "--uploads") -> int:
    """Make the folder of `what` ours alone, as long as the descriptor returned is open. Raises `SymbiosisError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SymbiosisError(f"{folder} cannot keep {what}: {error.strerror}; choose another with {option} FOLDER") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):  # some disks of a network have no locks
            raise SymbiosisError(
                f"{folder} cannot keep {what}, as it cannot be locked: {error.strerror}; choose another with {option} FOLDER"
            ) from None
        raise SymbiosisError(
            f"{folder} is in use by another server: stop that one, or keep {what} in another folder with {option} FOLDER"
        ) from None
    return handle


def kept(folder: Path) -> list[StoredAdapter]:
    """What is kept there, by owner and name. A note that cannot be read is no note."""
    found: list[StoredAdapter] = []
    for note in sorted(folder.glob(f"*/{NOTE}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(note.read_text())
            size = sum((note.parent / file).stat().st_size for file in FIELDS.values())
            found.append(StoredAdapter(about["owner"], str(about["name"]), note.parent, size))
    return found


def remove_left_over(folder: Path) -> None:
    """Only folders of our making; whatever else lies there is not ours."""
    for each in folder.glob("upload-*"):
        if not (each / NOTE).exists():
            shutil.rmtree(each, ignore_errors=True)


def remove_deserted(place: Path, pattern: str) -> None:
    """Folders of this user there that no server holds any more: it was killed before it could remove its own."""
    for each in place.glob(pattern):
        status = each.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            with suppress(SymbiosisError):
                handle = lock(each)
                shutil.rmtree(each, ignore_errors=True)
                os.close(handle)


class AdapterStore:
    """One for a server. All methods but `AdapterUpload.write` and `complete` are quick."""

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self._folder, self._limits = folder, limits
        remove_left_over(folder)  # of an HTTP process that died in mid-upload
        self._kept = {(each.owner, each.name): each for each in kept(folder)}
        self._uploads: list[AdapterUpload] = []

    def begin(self, owner: str | None, name: str) -> AdapterUpload:
        """Raises `TooManyRequests`."""
        running = [upload for upload in self._uploads if upload.owner == owner]
        if len(running) >= _AT_ONCE or any(upload.name == name for upload in running):
            raise TooManyRequests(
                f"{len(running)} uploads are under way, at most {_AT_ONCE} may, and one of a name. Try again later"
            )
        upload = AdapterUpload(self, self._folder / f"upload-{secrets.token_hex(12)}", owner, name)
        self._uploads.append(upload)
        return upload

    def place(self, tag: str) -> Path:
        """A folder to come, in which an adapter may be made; it is removed at the next start unless it is kept."""
        return self._folder / f"upload-{tag}"

    def keep(self, owner: str | None, name: str, folder: Path) -> None:
        """An adapter that was made there, and is served, stays, in place of an older one of that name."""
        size = sum((folder / file).stat().st_size for file in FIELDS.values())
        _note(folder, owner, name)
        before = self._kept.get((owner, name))
        if before is not None and before.folder != folder:
            shutil.rmtree(before.folder, ignore_errors=True)
        self._kept[owner, name] = StoredAdapter(owner, name, folder, size)

    def of(self, owner: str | None) -> list[StoredAdapter]:
        return [each for each in list(self._kept.values()) if each.owner == owner]  # other threads may keep some meanwhile

    def get(self, owner: str | None, name: str) -> StoredAdapter | None:
        return self._kept.get((owner, name))

    def has(self, owner: str | None, name: str) -> bool:
        """Also one that is being uploaded."""
        return (owner, name) in self._kept or any((each.owner, each.name) == (owner, name) for each in list(self._uploads))

    def remove(self, owner: str | None, name: str) -> bool:
        """False if it is not kept here."""
        found = self._kept.pop((owner, name), None)
        if found is not None:
            shutil.rmtree(found.folder, ignore_errors=True)
        return found is not None

    def room(self, upload: AdapterUpload) -> int:
        """How many bytes its owner may still send. What it replaces is counted too: both are there for a moment."""
        taken = sum(each.bytes for each in self.of(upload.owner))
        taken += sum(each.bytes for each in self._uploads if each.owner == upload.owner)
        return self._limits.bytes - taken

    def check_count(self, owner: str | None, promised: int) -> None:
        """With those that are being uploaded, and `promised` ones that jobs will bring. Raises `QuotaExceeded`."""
        names = {each.name for each in self.of(owner)} | {each.name for each in list(self._uploads) if each.owner == owner}
        count, most = len(names) + promised, self._limits.adapters
        if count > most:
            raise QuotaExceeded(
                f"you would have {count} adapters, {promised} of them from jobs that have not ended: at most {most} may be, "
                "so remove an adapter or cancel a job"
            )

    def check_bytes(self, owner: str | None) -> None:
        """Before an adapter is made, whose size nobody knows. Raises `QuotaExceeded` if there is no room at all."""
        if sum(each.bytes for each in self.of(owner)) >= self._limits.bytes:
            raise QuotaExceeded(f"your adapters have all of the {self._limits.bytes} bytes that are kept: remove one")

    def check_room(self, upload: AdapterUpload) -> None:
        if self.room(upload) < 0:
            raise QuotaExceeded(f"your adapters have more than the {self._limits.bytes} bytes that are kept: remove one")

    def end(self, upload: AdapterUpload, kept: StoredAdapter | None) -> None:
        self._uploads.remove(upload)
        if kept is None:
            shutil.rmtree(upload.folder, ignore_errors=True)
        else:
            self.remove(kept.owner, kept.name)
            self._kept[kept.owner, kept.name] = kept


class AdapterUpload:
    """An adapter on its way in. Ends with `keep` or `drop`."""

    def __init__(self, store: AdapterStore, folder: Path, owner: str | None, name: str) -> None:
        self.folder, self.owner, self.name, self.bytes = folder, owner, name, 0
        self._store = store
        self._files: dict[str, BinaryIO] = {}
        folder.mkdir(mode=0o700)

    def write(self, field: str, piece: bytes) -> None:
        """Raises `QuotaExceeded`, or `SymbiosisError` if the disk takes no more."""
        self.bytes += len(piece)
        self._store.check_room(self)
        try:
            if field not in self._files:
                self._files[field] = (self.folder / FIELDS[field]).open("xb")
            self._files[field].write(piece)
        except OSError as error:
            raise SymbiosisError(f"the adapter could not be kept: {error.strerror}") from None

    def complete(self) -> None:
        """Everything is on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def keep(self) -> None:
        """The engine serves it: it stays, in place of an older one of that name."""
        _note(self.folder, self.owner, self.name)
        self._store.end(self, StoredAdapter(self.owner, self.name, self.folder, self.bytes))

    def drop(self) -> None:
        for file in self._files.values():
            file.close()
        self._store.end(self, None)


def _note(folder: Path, owner: str | None, name: str) -> None:
    scratch = folder / f"{NOTE}.new"
    with scratch.open("w") as file:
        json.dump({"owner": owner, "name": name}, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(folder / NOTE)
    for each in (folder, folder.parent):  # what was answered to be kept is there after a crash
        handle = os.open(each, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
