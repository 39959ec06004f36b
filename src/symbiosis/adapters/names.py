"""Whose an adapter is, in the name the engine has it under: `pirate` is for everybody, `ann:pirate` is ann's own."""

from __future__ import annotations

from collections.abc import Container

from symbiosis.errors import UnknownAdapter

_MARK = ":"  # no adapter's own name has it


def qualify_name(owner: str | None, name: str) -> str:
    """The engine's name. No owner: for everybody."""
    return name if owner is None else f"{owner}{_MARK}{name}"


def split_qualified_name(full: str) -> tuple[str | None, str]:
    owner, mark, name = full.rpartition(_MARK)
    return (owner if mark else None), name


def resolve_adapter_name(name: str, tenant: str, served: Container[str]) -> str:
    """What a tenant means by a name: its own adapter goes before one for everybody, another's is not there.

    Raises `UnknownAdapter`, which names nobody else's.
    """
    if _MARK not in name:
        for full in (qualify_name(tenant, name), name):
            if full in served:
                return full
    raise UnknownAdapter(f"there is no adapter {name!r} here")
