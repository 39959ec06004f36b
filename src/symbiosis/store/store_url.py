"""The URL of a store: a folder, or a bucket."""

from __future__ import annotations

import re
from pathlib import Path

from symbiosis.errors import BadAddress
from symbiosis.store.folder_store import FolderStore
from symbiosis.store.object_store import ObjectStore
from symbiosis.store.remote_store import RemoteStore

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def open_object_store(url: str) -> ObjectStore:
    """A folder, or the URL of a bucket such as s3://bucket/prefix. Raises `BadAddress` or `StoreUnavailable`."""
    found = _SCHEME.fullmatch(url)
    if found is None or found[1] == "file":
        path = Path(url if found is None else found[2]).expanduser()
        if not path.is_absolute():
            raise BadAddress(f"the store {url!r}: expected an absolute path, which is the same on all hosts")
        return FolderStore(path)
    if re.search(r"[@?#\s]|::", found[2]) or not found[2].strip("/") or ".." in found[2].split("/"):
        raise BadAddress(
            f"the store {found[1]}://…: expected {found[1]}://BUCKET/PREFIX without a user, a query or spaces; "
            "credentials come from the environment"
        )
    return RemoteStore(found[1], found[2].strip("/"))


def resolve_url(url: str) -> str:
    """A relative folder as an absolute one: other processes have folders of their own."""
    return url if _SCHEME.fullmatch(url) else str(Path(url).expanduser().resolve())
