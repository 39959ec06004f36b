"""What the HTTP process is told at its start. Needs no web framework: the engine's process makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.queue import JobLimits
from symbiosis.server.adapter_store import StoreLimits
from symbiosis.server.rate_limits import RequestLimits

ADMIN = "admin"
"""The tenant that the admin's key stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All of it can be said in JSON."""

    base: str
    """The base model's name."""
    longest: int = 1 << 20
    """Most tokens of a prompt and its answer."""
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    """Secrets by tenant."""
    admin_key: str | None = field(default=None, repr=False)
    adapter_root: str | None = None
    """Where adapters may be loaded from while serving; None: from nowhere."""
    uploads: str | None = None
    """Where uploaded adapters are kept; None: nothing is taken."""
    store: StoreLimits = field(default_factory=StoreLimits)
    jobs: str | None = None
    """Where fine-tuning jobs are kept; None: none are taken."""
    training: dict[str, Any] = field(default_factory=dict)
    """What the engine says of its training: `longest` example, or `why` it trains nothing."""
    job_limits: JobLimits = field(default_factory=JobLimits)
    requests: RequestLimits = field(default_factory=RequestLimits)
    patience_s: float = 20.0
    """How long a client may take for a request's head, or for a body that hardly comes."""
    hosts: tuple[str, ...] | None = None
    """Names to be called by, if there are no keys."""

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Settings:
        """What `dataclasses.asdict` gave, once it has been JSON."""
        hosts = None if told["hosts"] is None else tuple(told["hosts"])
        return cls(
            **{
                **told,
                "hosts": hosts,
                "store": StoreLimits(**told["store"]),
                "requests": RequestLimits(**told["requests"]),
                "job_limits": JobLimits(**told["job_limits"]),
            }
        )

    def __post_init__(self) -> None:
        """Raises `SymbiosisError` without repeating a secret."""
        for name in self.keys:
            if not 0 < len(name) <= 64 or name == ADMIN:
                raise SymbiosisError(f"a key names the tenant {name!r}: expected 1 to 64 characters, and not {ADMIN!r}")
        secrets = [*self.keys.values(), *([] if self.admin_key is None else [self.admin_key])]
        if not all(secrets) or len(set(secrets)) != len(secrets):
            raise SymbiosisError("keys must not be empty, and no two alike: the server could not tell who asks")
