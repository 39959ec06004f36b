"""Names of devices, checked without torch."""

from __future__ import annotations

import ctypes

from symbiosis.errors import SymbiosisError

_DRIVERS = ("libcuda.so.1", "libamdhip64.so")  # torch calls AMD's GPUs cuda too


def check_driver(device: str) -> None:
    """Raise `SymbiosisError` for a GPU on a machine without a driver. `resolve_device` checks the rest, with torch."""
    if not device.startswith("cuda") or any(_can_load(name) for name in _DRIVERS):
        return
    raise SymbiosisError(f"--device {device:.40}: there is no such GPU here (no driver is installed); expected cpu")


def _can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
