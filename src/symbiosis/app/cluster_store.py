"""The store of a cluster, as a process of one host opens it."""

from __future__ import annotations

import hashlib
from contextlib import closing

from symbiosis.errors import BadAddress, StoreUnavailable
from symbiosis.models import blob_store
from symbiosis.store.artifact_cache import StoreConfig
from symbiosis.transport.engine_ipc import ClusterKey


def store_config(url: str, cache_gb: float) -> StoreConfig:
    """With its cache in the cache folder of this host."""
    return StoreConfig(url=url, folder=str((blob_store.root() / "store").absolute()), max_bytes=int(cache_gb * 1e9))


def cluster_of(secret: str) -> str:
    """What a store knows a cluster by. The secret does not follow from it."""
    return hashlib.sha256(ClusterKey.of(secret).public).hexdigest()[:32]


def check_store(url: str, secret: str, cache_gb: float, *, claim: bool = False) -> None:
    """Raises `BadAddress` or `StoreUnavailable`, with the URL. `claim`: a new store becomes that of this cluster."""
    try:
        with closing(store_config(url, cache_gb).open()) as cache:
            (cache.store.claim if claim else cache.store.check)(cluster_of(secret))
    except StoreUnavailable as error:
        raise type(error)(f"--store {url}: {error}") from None
    except BadAddress as error:
        raise BadAddress(f"--store: {error}") from None
