"""Settings of the HTTP process. Imports no web framework: the engine's process creates them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.queue import JobLimits
from symbiosis.server.adapter_store import StoreLimits
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.store.artifact_cache import StoreConfig

ADMIN = "admin"
"""Tenant name of the admin key."""
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
"""As browsers send it: in lower case, without a path."""
_LIMITS = {"store_limits": StoreLimits, "job_limits": JobLimits, "request_limits": RequestLimits}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """JSON-serializable by `dataclasses.asdict`."""

    base: str
    """Name of the base model."""
    hub_id: str | None = None
    """Its hub id, if that is not its name."""
    models: tuple[str, ...] = ()
    """Names of all models, if there are several: `base` is the default."""
    max_model_len: int = 1 << 20
    """Most tokens of a prompt and its completion."""
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    """Secrets by tenant."""
    admin_key: str | None = field(default=None, repr=False)
    adapter_root: str | None = None
    """Folder that the admin may load adapters from; None: loading is off."""
    uploads: str
    """Folder of uploaded adapters."""
    store_limits: StoreLimits = field(default_factory=StoreLimits)
    jobs: str
    """Folder of fine-tuning jobs."""
    store: StoreConfig | None = None
    """Of a cluster: adapters, and what engines read and write of jobs, are there instead."""
    max_training_len: int | None = None
    """Most tokens of a training example; None: as `max_model_len`."""
    training_error: str | None = None
    """Why the engine does not train."""
    job_limits: JobLimits = field(default_factory=JobLimits)
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    client_timeout_s: float = 20.0
    """Time for a client to send a request's head, or a body that makes no progress."""
    allowed_hosts: tuple[str, ...] | None = None
    """Accepted Host headers if there are no keys."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may send requests."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters where a request names none."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """The inverse of `asdict` after a JSON round trip."""
        hosts = None if values["allowed_hosts"] is None else tuple(values["allowed_hosts"])
        limits = {name: kind(**values[name]) for name, kind in _LIMITS.items()}
        store = None if values["store"] is None else StoreConfig(**values["store"])
        lists = {name: tuple(values[name]) for name in ("cors_origins", "models")}
        return cls(**{**values, **limits, **lists, "store": store, "allowed_hosts": hosts})

    def __post_init__(self) -> None:
        """Raises `SymbiosisError` without repeating a secret."""
        for name in self.keys:
            if not 0 < len(name) <= 64 or name == ADMIN:
                raise SymbiosisError(f"a key has the tenant name {name!r}: expected 1 to 64 characters, and not {ADMIN!r}")
        secrets = [*self.keys.values(), *([] if self.admin_key is None else [self.admin_key])]
        if not all(secrets) or len(set(secrets)) != len(secrets):
            raise SymbiosisError("keys must be non-empty and distinct: a key identifies one tenant")
        check_cors_origins(self.cors_origins, self.keys)


def check_cors_origins(origins: Collection[str], keys: Collection[str]) -> None:
    """Raises `SymbiosisError`. Without keys, every page of an allowed origin acts as the admin."""
    for origin in origins:
        if origin == "*" and not keys:
            raise SymbiosisError("--cors-origin '*' lets every web page use this server: set keys (--key), or name the origins")
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SymbiosisError(f"--cors-origin {origin!r:.80}: expected '*' or an origin such as https://app.example:8443")
