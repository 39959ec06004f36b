"""A plain text that chains and surrogates are measured on."""

from __future__ import annotations

from pathlib import Path

from symbiosis.zoo.errors import BadText

_MAX_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """Raises `BadText`."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadText(f"the text {path.name} has more than {_MAX_BYTES >> 20} MiB: expected a sample of plain text")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadText(f"the text {path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadText(f"the text {path.name} is not UTF-8: expected plain text") from None
