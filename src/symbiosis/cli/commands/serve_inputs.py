"""What commands that serve read: names with folders or secrets, and signals."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

from symbiosis.errors import SymbiosisError


def read_names(given: str, option: str) -> list[str]:
    """Parse `NAME,NAME`."""
    names = [name.strip() for name in given.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise SymbiosisError(f"{option} {given:.80}: expected different names, separated by commas")
    return names


def read_adapters(given: list[str]) -> dict[str, Path]:
    """Parse `NAME=FOLDER`."""
    adapters: dict[str, Path] = {}
    for entry in given:
        name, mark, folder = entry.partition("=")
        if not mark or not name or not folder:
            raise SymbiosisError(f"--adapter {entry}: expected NAME=FOLDER")
        if name in adapters:
            raise SymbiosisError(f"two adapters are named {name!r}: names must be unique")
        adapters[name] = Path(folder)
    return adapters


def read_tokens(given: list[str], environment: str, what: str = "token") -> dict[str, str]:
    """Parse `NAME=SECRET` or plain `SECRET`. Errors do not contain the secret."""
    tokens: dict[str, str] = {}
    plain = 0
    for entry in [*given, *(part.strip() for part in environment.split(",") if part.strip())]:
        name, mark, secret = entry.partition("=")
        if not mark:
            plain += 1
            name, secret = f"tenant-{plain}", entry
        if not name or not secret:
            raise SymbiosisError(f"a {what} must be NAME=SECRET or SECRET, neither empty")
        if name in tokens:
            raise SymbiosisError(f"two {what}s name the tenant {name!r}: give each tenant one")
        tokens[name] = secret
    return tokens


class Stop:
    """Set by signals. A second signal can interrupt the handler (`make` forwards signals), so it takes no lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __call__(self, *_: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._write, b".")

    def wait(self, seconds: float) -> bool:
        return bool(select.select([self._read], [], [], seconds)[0])
