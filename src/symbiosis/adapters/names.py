"""Qualified names of served adapters: `pirate` is shared by all tenants, `ann:pirate` belongs to tenant ann."""

from __future__ import annotations

from collections.abc import Container

from symbiosis.errors import UnknownAdapter

_SEPARATOR = ":"  # not allowed in an adapter's own name


def qualify_name(owner: str | None, name: str) -> str:
    """The engine's name of an adapter. Owner None: shared by all tenants."""
    return name if owner is None else f"{owner}{_SEPARATOR}{name}"


def split_qualified_name(full: str) -> tuple[str | None, str]:
    """Owner and name."""
    owner, separator, name = full.rpartition(_SEPARATOR)
    return (owner if separator else None), name


def resolve_adapter_name(name: str, tenant: str, served: Container[str]) -> str:
    """The qualified name for a tenant's name: its own adapter before a shared one, never another tenant's.

    Raises `UnknownAdapter`, without the names of other tenants' adapters.
    """
    if _SEPARATOR not in name:
        for full in (qualify_name(tenant, name), name):
            if full in served:
                return full
    raise UnknownAdapter(f"there is no adapter {name!r} here")
