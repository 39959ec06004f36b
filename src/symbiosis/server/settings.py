"""Settings of the HTTP process. Imports no web framework: the engine's process creates them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.queue import JobLimits
from symbiosis.server.adapter_store import StoreLimits
from symbiosis.server.rate_limits import RequestLimits

ADMIN = "admin"
"""Tenant name of the admin key."""
_LIMITS = {"store_limits": StoreLimits, "job_limits": JobLimits, "request_limits": RequestLimits}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """JSON-serializable by `dataclasses.asdict`."""

    base: str
    """Name of the base model."""
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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """The inverse of `asdict` after a JSON round trip."""
        hosts = None if values["allowed_hosts"] is None else tuple(values["allowed_hosts"])
        limits = {name: kind(**values[name]) for name, kind in _LIMITS.items()}
        return cls(**{**values, **limits, "allowed_hosts": hosts})

    def __post_init__(self) -> None:
        """Raises `SymbiosisError` without repeating a secret."""
        for name in self.keys:
            if not 0 < len(name) <= 64 or name == ADMIN:
                raise SymbiosisError(f"a key has the tenant name {name!r}: expected 1 to 64 characters, and not {ADMIN!r}")
        secrets = [*self.keys.values(), *([] if self.admin_key is None else [self.admin_key])]
        if not all(secrets) or len(set(secrets)) != len(secrets):
            raise SymbiosisError("keys must be non-empty and distinct: a key identifies one tenant")
