"""The device and dtype of a model, resolved from names."""

from __future__ import annotations

import torch

from symbiosis.errors import DtypeMissing, SymbiosisError

_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    if found not in _DTYPES or (found is None and dtype is not None):
        raise SymbiosisError(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    return found


def check_dtype(name: str, device: torch.device) -> None:
    """Raise `DtypeMissing` unless this host has the executor's dtype and `device` computes in it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DtypeMissing(
            f"the executor computes in {name:.40}, which torch {torch.__version__} of this host does not have: install the "
            "executor's version of torch, or use an executor with --dtype float32"
        )
    try:
        one = torch.ones(1, 1, device=device).to(dtype)
        torch.nn.functional.linear(one, one)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise DtypeMissing(
            f"the executor computes in {name}, and device {str(device)!r} of this host does not ({reason}): pass another "
            "device=, or use an executor with --dtype float32"
        ) from None


def is_device_alive(device: torch.device) -> bool:
    """Whether the device still computes: some CUDA errors are permanent."""
    try:
        return int(torch.ones(1, device=device).item()) == 1
    except Exception:  # noqa: BLE001 - any error means that it does not
        return False
