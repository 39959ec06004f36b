"""Quantities in text: bytes, rates, token counts. Parsed from options, written into tables and errors."""

from __future__ import annotations

import re

from symbiosis.errors import SymbiosisError

_NUMBER = r"(\d+(?:\.\d+)?)"
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_RATES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
MAX_BYTES = 1 << 50
_MAX_TOKENS = 1 << 24


def parse_bytes(text: str) -> int | None:
    """Of `80GB` (10⁹) or `80GiB` (2³⁰); None if the text is not a size. Raises `SymbiosisError` if it is absurd."""
    match = re.fullmatch(rf"{_NUMBER}\s*([KMGT]I?)B", text.strip().upper())
    if match is None:
        return None
    size = int(float(match[1]) * _BYTES[match[2]])
    if not 0 < size <= MAX_BYTES:
        raise SymbiosisError(f"{text!r:.40} is not a size of memory: expected more than 0, at most 1 PiB")
    return size


def parse_rate(text: str, unit: str) -> float | None:
    """Of `3.3TB/s` (unit `B/s`), `10Gbit/s` (`BIT/S`) or `300TFLOPS` (`FLOPS`), per second; None for other text."""
    match = re.fullmatch(rf"{_NUMBER}\s*([KMGTP]?){re.escape(unit.upper())}", text.strip().upper())
    if match is None:
        return None
    rate = float(match[1]) * _RATES[match[2]]
    if not 0 < rate <= 1e18:
        raise SymbiosisError(f"{text!r:.40}: expected a rate above 0, at most 10¹⁸ per second")
    return rate


def parse_tokens(text: str) -> int:
    """Of `512`, `8k` (1024 each) or `1m`. Raises `SymbiosisError`."""
    match = re.fullmatch(r"(\d{1,8})([kKmM]?)", text.strip())
    tokens = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if not 0 < tokens <= _MAX_TOKENS:
        raise SymbiosisError(f"{text!r:.40} is not a number of tokens: expected 1 to {_MAX_TOKENS}, such as 512 or 8k")
    return tokens


def format_bytes(size: float) -> str:
    """Three digits at most after rounding: `1.35 GB`, `420 MB`."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * scale:
            value = size / scale
            return f"{sign}{value:.0f} {unit}" if value >= 99.5 else f"{sign}{value:.3g} {unit}"
    return f"{sign}{size / 1e3:.0f} kB"


def format_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1e3 * scale else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def format_tokens(tokens: int) -> str:
    """`8k` for 8192, `500` for 500."""
    return f"{tokens >> 10}k" if tokens and tokens % 1024 == 0 else str(tokens)
