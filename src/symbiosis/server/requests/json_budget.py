"""Counts the values of a JSON body before it is parsed: many small values take seconds and block the event loop."""

from __future__ import annotations

from symbiosis.errors import TooLarge

_MAX_STRINGS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_CONTAINERS = 1 << 15
_MAX_VALUES = 1 << 20


def check_values(body: bytes | bytearray) -> None:
    """Raises `TooLarge`. Accepts any bytes, whether they are JSON or not."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check(bare.count(b'"') // 2, _MAX_STRINGS, "strings and keys")
    outside = b"".join(bare.split(b'"')[::2])
    _check(outside.count(b":"), _MAX_KEYS, "keys")
    _check(outside.count(b"[") + outside.count(b"{"), _MAX_CONTAINERS, "lists and objects")
    _check(outside.count(b",") + 1, _MAX_VALUES, "values")


def _check(found: int, most: int, what: str) -> None:
    if found > most:
        raise TooLarge(f"the body has {found} {what}, at most {most} allowed: split it into several requests")
