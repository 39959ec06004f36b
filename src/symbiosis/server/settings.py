"""What the HTTP process is told at its start. Needs no web framework: the engine's process makes it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All of it can be said in JSON."""

    base: str
    """The base model's name."""
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    """Secrets by tenant."""
    admin_key: str | None = field(default=None, repr=False)
    adapter_root: str | None = None
    """Where adapters may be loaded from while serving; None: from nowhere."""
    hosts: tuple[str, ...] | None = None
    """Names to be called by, if there are no keys."""
