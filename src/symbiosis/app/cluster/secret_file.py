"""The file with a cluster's secret: only its owner can read it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from symbiosis.errors import SymbiosisError

MIN_SECRET = 16
_MAX_BYTES = 4096


def read_secret(file: Path) -> str:
    """Raises `SymbiosisError`; the message never has the secret."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            secret = opened.read(_MAX_BYTES).decode().strip()
    except FileNotFoundError:
        raise SymbiosisError(
            f"there is no secret file {file}: copy the one of `symbiosis cluster up`, and name it with --secret-file"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SymbiosisError(f"cannot read the secret in {file}: {reason}") from None
    if mode & 0o077:
        raise SymbiosisError(f"other users may read the secret in {file}: expected mode 600. Run: chmod 600 {file}")
    if len(secret) < MIN_SECRET:
        raise SymbiosisError(f"the secret in {file} has {len(secret)} characters: expected at least {MIN_SECRET}")
    return secret


def read_or_create_secret(file: Path) -> str:
    """A new file has a new secret and mode 600. Raises `SymbiosisError`."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_secret(file)
    except OSError as error:
        raise SymbiosisError(
            f"cannot create the secret file {file}: {error.strerror}; choose another with --secret-file"
        ) from None
    with os.fdopen(handle, "w") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    return read_secret(file)
