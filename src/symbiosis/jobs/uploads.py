"""Files that tenants upload: kept under names of ours, counted against each tenant's room."""

from __future__ import annotations

import os
import re
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from symbiosis.errors import QuotaExceeded, TooLarge, TooManyRequests
from symbiosis.jobs.atomic_files import to_disk, told
from symbiosis.jobs.database import Database, FileRecord
from symbiosis.jobs.errors import UnknownFile
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.queue import JobLimits

_AT_ONCE = 4  # uploads of one tenant
_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069/\\]")


class Uploads:
    """One for a server."""

    def __init__(self, folder: JobsLayout, records: Database, limits: JobLimits) -> None:
        self._folder, self._records, self._limits = folder, records, limits
        self._coming: list[IncomingUpload] = []
        self._changing = threading.Lock()

    def begin(self, tenant: str) -> IncomingUpload:
        """Raises `TooManyRequests` or `QuotaExceeded`."""
        with self._changing:
            under_way = sum(each.tenant == tenant for each in self._coming)
            if under_way >= _AT_ONCE:
                raise TooManyRequests(f"{under_way} uploads of yours are under way, and no more may be. Try again later")
            count, _ = self._records.files_taken(tenant)
            if count + under_way >= self._limits.tenant_files:
                raise QuotaExceeded(f"{count} files are kept for you, at most {self._limits.tenant_files} may: delete one")
            incoming = IncomingUpload(self, self._folder.file(f"file-{secrets.token_hex(12)}"), tenant)
            self._coming.append(incoming)
            return incoming

    def check_room(self, incoming: IncomingUpload) -> None:
        if incoming.bytes > self._limits.file_bytes:
            raise TooLarge(f"a file has {self._limits.file_bytes} bytes at most")
        _, taken = self._records.files_taken(incoming.tenant)
        with self._changing:
            taken += sum(each.bytes for each in self._coming if each.tenant == incoming.tenant)
        if taken > self._limits.tenant_bytes:
            raise QuotaExceeded(f"your files have more than the {self._limits.tenant_bytes} bytes that are kept: delete one")

    def end(self, incoming: IncomingUpload, filename: str | None) -> FileRecord | None:
        kept: FileRecord | None = None
        try:
            if filename is not None:
                kept = self._records.add_file(incoming.path.name, incoming.tenant, shown(filename), incoming.bytes)
            return kept
        finally:
            if kept is None:
                incoming.path.unlink(missing_ok=True)
            with self._changing:  # for a moment it counts twice rather than not at all
                if incoming in self._coming:
                    self._coming.remove(incoming)

    def path(self, id: str, tenant: str) -> Path:
        """Raises `UnknownFile`."""
        path = self._folder.file(self._records.file(id, tenant).id)
        if not path.exists():
            raise UnknownFile(f"the file {id} is being deleted")
        return path

    def remove(self, id: str, tenant: str) -> None:
        """Jobs have copies of their own of what they need. The content goes first: on a full disk, a change of the record
        needs the room that it had. Raises `UnknownFile`.
        """
        file = self._records.file(id, tenant)
        with told():
            self._folder.file(file.id).unlink(missing_ok=True)
        self._records.remove_file(id, tenant)


class IncomingUpload:
    """A file on its way in. Ends with `keep` or `drop`."""

    def __init__(self, files: Uploads, path: Path, tenant: str) -> None:
        self._files, self.path, self.tenant, self.bytes = files, path, tenant, 0
        with told():
            self._file: BinaryIO = path.open("xb")

    def write(self, piece: bytes) -> None:
        """Raises `TooLarge`, `QuotaExceeded` or `StorageFull`."""
        self.bytes += len(piece)
        self._files.check_room(self)
        with told():
            self._file.write(piece)

    def keep(self, filename: str) -> FileRecord:
        """It is on the disk, and recorded."""
        with told():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            to_disk(self.path.parent)
        kept = self._files.end(self, filename)
        assert kept is not None
        return kept

    def drop(self) -> None:
        with suppress(OSError):  # what is not written yet need not be
            self._file.close()
        self._files.end(self, None)


def shown(filename: str) -> str:
    """What a file is called by its owner: it is shown and never opened."""
    return _ODD.sub("_", filename)[:255] or "file"
