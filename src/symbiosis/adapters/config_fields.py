"""Reading a config key by key: each key has a type, a range and a default, and none is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from symbiosis.adapters.files import CONFIG, quote
from symbiosis.errors import BadAdapter, UnsupportedAdapter

_MAX_NAMES = 20_000
_MAX_KEYS = 4096
_MAX_NAME = 512


class Fields:
    """The keys of a config. The methods take a key, checked; `finish` checks the keys that are left."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = dict(raw)

    def take(self, key: str) -> Any:
        return self._raw.pop(key, None)

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An absent key has PEFT's default, if PEFT has one; null is not absent."""
        if key not in self._raw and default is None:
            raise BadAdapter(f"{CONFIG} has no {key}: expected a whole number from {low} to {high}")
        return self.checked_integer(key, self._raw.pop(key, default), low, high)

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        value = self.take(key)
        return None if value is None else self.checked_integer(key, value, low, high)

    def number(self, key: str, default: float) -> float:
        """An absent key has the default; null is not absent."""
        return self.checked_number(key, self._raw.pop(key, default))

    def names(self, key: str, most: int = _MAX_NAMES) -> tuple[str, ...]:
        """A list of names, empty if the key is absent."""
        value = self.take(key)
        return () if value is None else self.checked_names(key, value, most)

    def names_or_text(self, key: str) -> tuple[str, ...] | str | None:
        value = self.take(key)
        if value is None or isinstance(value, str):
            return value
        return self.checked_names(key, value)

    def table(self, key: str) -> dict[str, Any]:
        value = self.take(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > _MAX_KEYS:
            raise self.wrong(key, value, f"an object of at most {_MAX_KEYS} keys")
        return value

    def finish(self, *, harmless: frozenset[str], refused: Mapping[str, str]) -> None:
        """Each key that is left must be harmless or off. Raises `UnsupportedAdapter`."""
        for key, value in self._raw.items():
            if key in harmless or is_off(value):
                continue
            reason = refused.get(key, "not a setting known here, so its effect is unknown")
            raise UnsupportedAdapter(f"{CONFIG} sets {quote(key)} to {quote(value)}: {reason}")

    @staticmethod
    def checked_integer(key: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Fields.wrong(key, value, f"a whole number from {low} to {high}")
        return value

    @staticmethod
    def checked_number(key: str, value: Any) -> float:
        if type(value) not in (int, float) or abs(value) > 1e9 or not math.isfinite(value):
            raise Fields.wrong(key, value, "a number")
        return float(value)

    @staticmethod
    def checked_names(key: str, value: Any, most: int = _MAX_NAMES) -> tuple[str, ...]:
        if (
            not isinstance(value, list)
            or len(value) > most
            or not all(isinstance(name, str) and 0 < len(name) <= _MAX_NAME for name in value)
        ):
            raise Fields.wrong(key, value, f"a list of at most {most} names")
        return tuple(value)

    @staticmethod
    def wrong(key: str, value: Any, expected: str) -> BadAdapter:
        return BadAdapter(f"{CONFIG}: {quote(key)} is {quote(value)}, expected {expected}")


def is_off(value: Any) -> bool:
    """Whether a setting has no effect: null, false or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
