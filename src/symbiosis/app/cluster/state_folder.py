"""The folder of a cluster on this host: what outlives a restart, and which process runs the cluster now."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from symbiosis.errors import NotStored, SymbiosisError
from symbiosis.jobs.atomic_files import write_atomic
from symbiosis.server.adapter_store import lock_folder

_RECORD = "cluster.json"
_POLL_S = 0.1


def default_state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "symbiosis" / "cluster"


class StateFolder:
    """Locked while the cluster runs: after a crash the record of its process is known to be old. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises `SymbiosisError` if another cluster runs there, or if the folder cannot be written to."""
        self.path = path
        self._lock = lock_folder(path, "a cluster", "--state")
        try:
            self.record()
        except BaseException:
            os.close(self._lock)
            raise

    def record(self, **facts: Any) -> None:
        """Note this process and the facts. Raises `NotStored`."""
        try:
            write_atomic(self.path / _RECORD, json.dumps({"pid": os.getpid(), **facts}).encode())
        except (OSError, SymbiosisError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise NotStored(f"{self.path} cannot store a cluster: {reason}; choose another with --state FOLDER") from None

    def __enter__(self) -> StateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            (self.path / _RECORD).unlink(missing_ok=True)
        os.close(self._lock)


def running_cluster(path: Path) -> dict[str, Any] | None:
    """The record of the cluster that runs there: pid, and url once it serves."""
    if not path.is_dir():
        return None
    with suppress(SymbiosisError):
        os.close(lock_folder(path))
        return None
    try:
        record = json.loads((path / _RECORD).read_bytes())
    except (OSError, ValueError):
        return None  # it is just starting or ending
    return record if isinstance(record, dict) and type(record.get("pid")) is int else None


def stop_cluster(path: Path, timeout_s: float) -> int:
    """End the cluster that runs there, and wait until it has ended; its pid. Raises `SymbiosisError`."""
    record = running_cluster(path)
    if record is None:
        raise SymbiosisError(f"no cluster runs in {path}: name its folder with --state, or start one: symbiosis cluster up")
    pid = int(record["pid"])
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return pid
    except PermissionError:
        raise SymbiosisError(f"the cluster in {path} belongs to another user: process {pid}") from None
    deadline = time.monotonic() + timeout_s
    while running_cluster(path) is not None:
        if time.monotonic() > deadline:
            raise SymbiosisError(f"the cluster in {path} has not ended within {timeout_s:g} s: its process is {pid}")
        time.sleep(_POLL_S)
    return pid
