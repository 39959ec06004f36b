"""The plain files of an untrusted adapter folder. Imports no torch: the HTTP processes read configs with it.

Only plain files of bounded size are opened, by name, in a folder that is open already: no link is followed and no path
from outside is used. JSON is strict: UTF-8, no duplicate key, no NaN.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from symbiosis.errors import BadAdapter

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLimits:
    """Limits on the size of an adapter."""

    max_rank: int = 512
    max_virtual_tokens: int = 4096
    max_bytes: int = 8 << 30
    """Of the safetensors file."""
    max_header_bytes: int = 8 << 20
    """Of the safetensors file's header."""
    max_config_bytes: int = 1 << 20


def quote(value: object) -> str:
    """An untrusted value for a message: short, and without characters that a terminal would interpret."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def join_names(names: list[str]) -> str:
    """At most three names, for a message."""
    return ", ".join(name[:120] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def open_plain_file(folder_fd: int, name: str, max_bytes: int) -> Iterator[BufferedReader]:
    """A plain file of bounded size in a folder that is open already. Raises `BadAdapter`."""
    try:
        # Non-blocking: opening a pipe without a writer must not wait.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        raise BadAdapter(f"{name} is missing: expected a folder as PEFT's `save_pretrained` writes it") from None
    except OSError as error:
        raise BadAdapter(f"{name} cannot be opened ({error.strerror}); it must be a plain file, not a link") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
        os.close(handle)
        reason = (
            f"has {found.st_size} bytes, more than the {max_bytes} allowed"
            if stat.S_ISREG(found.st_mode)
            else "is not a plain file"
        )
        raise BadAdapter(f"{name} {reason}")
    with os.fdopen(handle, "rb") as file:
        yield file


def parse_strict_json(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `raw`. Raises `BadAdapter`."""

    def build_object(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            raise BadAdapter(f"{name} has the key {quote(twice)} twice")
        return found

    def reject_constant(text: str) -> None:
        raise BadAdapter(f"{name} has {text}, which is not a JSON number")

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=build_object, parse_constant=reject_constant)
    except UnicodeDecodeError:
        raise BadAdapter(f"{name} is not UTF-8 text") from None
    except RecursionError:
        raise BadAdapter(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise BadAdapter(f"{name} is not JSON: {quote(str(error))}") from None
    if not isinstance(found, dict):
        raise BadAdapter(f"{name} must hold one JSON object, not {type(found).__name__}")
    return found
