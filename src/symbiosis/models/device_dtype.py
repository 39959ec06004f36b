"""The device and dtype of a model, resolved from names."""

from __future__ import annotations

import torch

from symbiosis.errors import SymbiosisError


def resolve_device(device: str | torch.device) -> torch.device:
    """An existing device. Raises `SymbiosisError`."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise SymbiosisError(f"device={device!r}: expected cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        reason = f"torch sees {torch.cuda.device_count()} GPUs" if torch.version.cuda else "this torch was built without CUDA"
        raise SymbiosisError(f"device={str(resolved)!r}: there is no such GPU here ({reason})")
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None: the dtype of the stored model. Raises `SymbiosisError`."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise SymbiosisError(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    return found


def is_device_alive(device: torch.device) -> bool:
    """Whether the device still computes: some CUDA errors are permanent."""
    try:
        return int(torch.ones(1, device=device).item()) == 1
    except Exception:  # noqa: BLE001 - any error means that it does not
        return False
