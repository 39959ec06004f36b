"""How many values a JSON body holds, told before it is read: many small ones take seconds, and nobody is answered meanwhile."""

from __future__ import annotations

from symbiosis.errors import TooLarge

_MOST_TEXTS = 1 << 17
_MOST_KEYS = 1 << 16
_MOST_GROUPS = 1 << 15
_MOST_VALUES = 1 << 20


def check_values(body: bytes | bytearray) -> None:
    """Raises `TooLarge`. Whether it is JSON at all is for others to say."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check(bare.count(b'"') // 2, _MOST_TEXTS, "texts and keys")
    outside = b"".join(bare.split(b'"')[::2])
    _check(outside.count(b":"), _MOST_KEYS, "keys")
    _check(outside.count(b"[") + outside.count(b"{"), _MOST_GROUPS, "lists and objects")
    _check(outside.count(b",") + 1, _MOST_VALUES, "values")


def _check(found: int, most: int, what: str) -> None:
    if found > most:
        raise TooLarge(f"the body has {found} {what}, at most {most} are taken: ask in several requests")
