"""Processes that this one has started."""

from __future__ import annotations

import subprocess


def wait_or_kill(process: subprocess.Popen[bytes] | subprocess.Popen[str], timeout_s: float) -> None:
    """Return when it has ended; kill it after `timeout_s`."""
    try:
        process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
