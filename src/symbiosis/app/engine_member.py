"""An engine of a cluster: loads a model, serves it to the cluster's front doors, and is a member of the cluster."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from symbiosis.app.cluster_membership import ClusterMembership
from symbiosis.app.cluster_store import cluster_of, store_config
from symbiosis.app.engine_host import EngineHost, default_sampling, name_model
from symbiosis.errors import BadMessage, StoreUnavailable
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.models.client_part import store_bytes, unpack_tokenizer
from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.models.fingerprint import fingerprint_model
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import load
from symbiosis.planning.memory_check import check_server
from symbiosis.planning.model_size import ModelSize
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.store.artifact_folders import LocalFolders
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, EngineListener

_CHECK_S = 0.5
_STORE_S = 5.0
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """JSON-serializable but for `director`."""

    name: str
    """Of this engine, unique in the cluster."""
    director: EngineAddress
    secret: str = field(repr=False)
    """The cluster's."""
    host: str = "127.0.0.1"
    """Where to listen, at ports that the system chooses. The cluster's front doors connect to it."""
    model: str | None = None
    """A folder or a hub id; None: the default model."""
    device: str | None = None
    """None: the CPU."""
    dtype: str | None = None
    """None: that of the stored model."""
    threads: int | None = None
    """Threads that compute on a CPU; None: all."""
    training: bool = True
    adapter_gb: float = 2.0
    adapter_host_gb: float = 4.0
    adapter_slots: int = 256
    """Most adapters on the device."""
    cache_gb: float | None = None
    """None: 1024 blocks of 16 tokens."""
    host_cache_gb: float = 0.0
    max_rows: int = 2048
    max_running: int = 512
    store: str | None = None
    """Of the cluster: its adapters and what its jobs read and write. None: they are in folders that this engine has."""
    store_cache_gb: float = 20.0
    """Of its content on this host."""
    max_queued: int = 4096
    tenant_queued: int = 1024

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> MemberConfig:
        """Raises `BadMessage`."""
        try:
            return cls(**{**body, "director": EngineAddress.from_json(body.get("director"))})
        except (TypeError, AttributeError) as error:
            raise BadMessage(f"the configuration of an engine: {error!s:.200}") from None

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_gb is None else int(self.cache_gb * 1e9)

    @property
    def residency(self) -> AdapterCacheConfig:
        return AdapterCacheConfig(
            device_bytes=int(self.adapter_gb * 1e9), host_bytes=int(self.adapter_host_gb * 1e9), slots=self.adapter_slots
        )


class EngineMember:
    """Loads the model and serves it at `address`; joins in `run`. A context manager.

    A process or an actor runs it: nothing here ends the process, reads its input or handles signals.
    """

    def __init__(self, config: MemberConfig) -> None:
        """Returns when the engine serves. Raises `UnknownModel`, `DoesNotFit`, `CannotServe` or `OutOfRange`."""
        self._config, self._key = config, ClusterKey.of(config.secret)
        self._cache = None if config.store is None else store_config(config.store, config.store_cache_gb).open()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device, dtype = resolve_device(config.device or "cpu"), resolve_dtype(config.dtype)
        check_server(
            ModelSize.of(config.model, dtype),
            device,
            hosting=True,
            cache_bytes=config.cache_bytes,
            adapter_bytes=config.residency.device_bytes,
        )
        source = load(config.model, device=device, dtype=dtype)
        fingerprint = fingerprint_model(source.model)
        fuse_projections(source.model)
        base, hub_id = name_model(source.model, source.name)
        sampling = default_sampling(source.model, base)
        tokenizer = None if source.tokenizer is None else str(unpack_tokenizer(store_bytes(source.tokenizer)))
        self._engine = engine = EngineHost(
            source.model,
            base,
            EngineListener(host=config.host, clients=self._key),
            training=TrainerConfig() if config.training else None,
            residency=config.residency,
            fingerprint=fingerprint,
            cache_bytes=config.cache_bytes,
            host_cache_bytes=int(config.host_cache_gb * 1e9),
            max_rows=config.max_rows,
            max_running=config.max_running,
            max_queued=config.max_queued,
            tenant_queued=min(config.tenant_queued, config.max_queued),
            folders=self._cache or LocalFolders(),
        )
        engine.attach_statistics(HttpCounts(engine.service.rpc, engine.statistics.collect), has_keys=False)
        self.address: EngineAddress = engine.service.address
        blocks = engine.core.scheduler.block_manager
        self._facts = {
            "name": config.name,
            "address": self.address.to_json(),
            "model": {"name": base, "hub_id": hub_id, "fingerprint": fingerprint},
            "facts": {
                "slots": engine.residency.slots,
                "kv_tokens": blocks.num_blocks * blocks.block_size,
                "max_running": config.max_running,
                "max_model_len": engine.max_model_len,
                "max_training_len": engine.max_training_len,
                "training_error": None if engine.training_error is None else str(engine.training_error),
                "default_sampling": sampling,
                "tokenizer": tokenizer,
            },
        }

    def run(self, stopped: threading.Event) -> None:
        """Be a member of the cluster until stopped. Raises `JoinRejected`, or `EngineLost` if the engine has failed.

        It joins when it can use the store: another node may have credentials, or a mount, that this one lacks.
        """
        while not stopped.is_set() and not self._can_store():
            stopped.wait(_STORE_S)
        with ClusterMembership(self._config.director, self._key, self._facts) as membership:
            while not stopped.wait(_CHECK_S):
                self._engine.check()
                membership.check()

    def _can_store(self) -> bool:
        if self._cache is None:
            return True
        try:
            self._cache.store.check(cluster_of(self._config.secret))
        except StoreUnavailable as error:
            _log.warning("the engine %s waits for the store %s: %s", self._config.name, self._config.store, error)
            return False
        return True

    def close(self) -> None:
        """Running requests end in `Closed`: front doors place them at other engines."""
        self._engine.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> EngineMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
