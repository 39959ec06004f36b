"""Uploaded training files: stored under generated names, counted against each tenant's quota."""

from __future__ import annotations

import os
import re
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from symbiosis.errors import QuotaExceeded, TooLarge, TooManyRequests
from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk
from symbiosis.jobs.database import Database, FileRecord
from symbiosis.jobs.errors import UnknownFile
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.queue import JobLimits

_TENANT_UPLOADS = 4
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069/\\]")


class Uploads:
    """One per server. Thread-safe."""

    def __init__(self, layout: JobsLayout, db: Database, limits: JobLimits) -> None:
        self._layout, self._db, self._limits = layout, db, limits
        self._active: list[IncomingUpload] = []
        self._lock = threading.Lock()

    def open(self, tenant: str) -> IncomingUpload:
        """Raises `TooManyRequests` or `QuotaExceeded`."""
        with self._lock:
            active = sum(upload.tenant == tenant for upload in self._active)
            if active >= _TENANT_UPLOADS:
                raise TooManyRequests(f"{active} uploads in progress, at most {_TENANT_UPLOADS} allowed. Try again later")
            count, _ = self._db.file_usage(tenant)
            if count + active >= self._limits.tenant_files:
                raise QuotaExceeded(f"{count} files stored, at most {self._limits.tenant_files} allowed: delete one")
            upload = IncomingUpload(self, self._layout.file_path(f"file-{secrets.token_hex(12)}"), tenant)
            self._active.append(upload)
            return upload

    def check_quota(self, upload: IncomingUpload) -> None:
        if upload.bytes > self._limits.file_bytes:
            raise TooLarge(f"the file is larger than the {self._limits.file_bytes} bytes allowed")
        _, used = self._db.file_usage(upload.tenant)
        with self._lock:
            used += sum(other.bytes for other in self._active if other.tenant == upload.tenant)
        if used > self._limits.tenant_bytes:
            raise QuotaExceeded(f"file quota exceeded: {used} bytes > {self._limits.tenant_bytes} allowed: delete a file")

    def record(self, upload: IncomingUpload, filename: str) -> FileRecord:
        record = self._db.add_file(upload.path.name, upload.tenant, sanitize_filename(filename), upload.bytes)
        self.release(upload)  # after the record: the bytes count twice for a moment rather than not at all
        return record

    def release(self, upload: IncomingUpload) -> None:
        with self._lock:
            self._active.remove(upload)

    def path(self, id: str, tenant: str) -> Path:
        """Raises `UnknownFile`."""
        path = self._layout.file_path(self._db.get_file(id, tenant).id)
        if not path.exists():
            raise UnknownFile(f"the file {id} is being deleted")
        return path

    def remove(self, id: str, tenant: str) -> None:
        """Delete a file; jobs hold their own links. Raises `UnknownFile`.

        The content is removed first: on a full disk the database needs the space that it frees.
        """
        file = self._db.get_file(id, tenant)
        with map_os_errors():
            self._layout.file_path(file.id).unlink(missing_ok=True)
        self._db.remove_file(id, tenant)


class IncomingUpload:
    """A file being uploaded. Ends with `commit` or `abort`."""

    def __init__(self, uploads: Uploads, path: Path, tenant: str) -> None:
        self._uploads, self.path, self.tenant, self.bytes = uploads, path, tenant, 0
        with map_os_errors():
            self._file: BinaryIO = path.open("xb")

    def write(self, chunk: bytes) -> None:
        """Raises `TooLarge`, `QuotaExceeded` or `StorageFull`."""
        self.bytes += len(chunk)
        self._uploads.check_quota(self)
        with map_os_errors():
            self._file.write(chunk)

    def commit(self, filename: str) -> FileRecord:
        """Sync to disk, then record. Raises `StorageFull`; then the upload is aborted."""
        try:
            with map_os_errors():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                sync_to_disk(self.path.parent)
            return self._uploads.record(self, filename)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        with suppress(OSError):  # close() flushes, and the disk may be full
            self._file.close()
        self.path.unlink(missing_ok=True)
        self._uploads.release(self)


def sanitize_filename(filename: str) -> str:
    """The name to show. It is never opened."""
    return _UNSAFE.sub("_", filename)[:255] or "file"
