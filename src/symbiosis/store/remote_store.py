"""Objects in a bucket, through fsspec. The one module that imports it.

A bucket shows an object when it is whole. Credentials and the endpoint come from the environment, as the driver reads them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from symbiosis.errors import BadAddress, StoreFull, StoreUnavailable
from symbiosis.store.object_store import PART_BYTES

_DRIVERS = {"s3": "s3fs"}
"""Packages by scheme."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"mode": "standard", "max_attempts": 2}},
    }
}
_NO_CREDENTIALS = ("NoCredentials", "PartialCredentials", "CredentialRetrieval", "TokenRetrieval", "ProfileNotFound")
"""Beginnings of the names of errors of botocore."""
_FULL = re.compile("quota|storagefull|insufficientstorage|no space", re.IGNORECASE)
_NO_BUCKET = "specified bucket does not exist"
_ATTEMPTS = 2
_URL = re.compile(r"\"?[a-z]+://\S+")
_MAX_REASON = 160


class RemoteStore:
    """An `ObjectStore`."""

    def __init__(self, scheme: str, path: str) -> None:
        """Raises `BadAddress` if the scheme is unknown, or its package is not installed."""
        if scheme not in _DRIVERS:
            raise BadAddress(
                f"the store {scheme}://…: expected a folder, or one of {', '.join(f'{each}://' for each in _DRIVERS)}"
            )
        try:
            importlib.import_module(_DRIVERS[scheme])
            import fsspec
        except ImportError as error:
            raise BadAddress(f"the store {scheme}://… needs the package {error.name}: pip install 'symbiosis[store]'") from None
        self._root = path
        with _mapping():
            self._files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS[scheme])
            self._files.retries = _ATTEMPTS

    def write(self, name: str, content: bytes | Path) -> None:
        path = f"{self._root}/{name}"
        with _mapping():
            if isinstance(content, bytes):
                self._files.pipe_file(path, content)
            else:
                self._files.put_file(str(content), path)

    def read(self, name: str, max_bytes: int) -> Iterator[bytes]:
        path, start = f"{self._root}/{name}", 0
        with _mapping():
            size = min(self._files.info(path)["size"], max_bytes)
            while start < size:
                part: bytes = self._files.cat_file(path, start=start, end=min(start + PART_BYTES, size))
                yield part
                start += max(1, len(part))

    def exists(self, name: str) -> bool:
        with _mapping():
            try:
                return bool(self._files.info(f"{self._root}/{name}")["type"] == "file")
            except FileNotFoundError:
                return False

    def list(self, folder: str) -> list[str]:
        with _mapping():
            try:
                found = self._files.find(f"{self._root}/{folder}")
            except FileNotFoundError:
                return []
            return [path.removeprefix(f"{self._root}/") for path in found]

    def remove(self, name: str) -> None:
        with _mapping():
            try:
                self._files.rm(f"{self._root}/{name}", recursive=True)
            except FileNotFoundError:
                return


@contextmanager
def _mapping() -> Iterator[None]:
    """Messages without bucket and endpoint: tenants see them. `FileNotFoundError` stays, unless the bucket is missing."""
    try:
        yield
    except (StoreUnavailable, GeneratorExit):
        raise
    except FileNotFoundError as error:
        if _NO_BUCKET in str(error):
            raise StoreUnavailable("the store's bucket does not exist: create it, or name another one") from None
        raise
    except Exception as error:  # noqa: BLE001 - drivers raise errors of their own
        raise _describe(error) from None


def _describe(error: Exception) -> StoreUnavailable:
    kind, reason = type(error).__name__, _URL.sub("…", (str(error).splitlines() or [""])[0])[:_MAX_REASON]
    if kind.startswith(_NO_CREDENTIALS):
        return StoreUnavailable(
            "the store has no credentials: expected them in the environment of each host, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    if _FULL.search(reason):
        return StoreFull("the store is full: nothing was written. Try again later, or tell the provider")
    if isinstance(error, PermissionError):
        return StoreUnavailable(
            f"the store denies access ({reason}): expected credentials that may list, read, write and delete objects there"
        )
    return StoreUnavailable(
        f"the store cannot be reached ({reason or kind}): expected an endpoint that replies, see AWS_ENDPOINT_URL"
    )
