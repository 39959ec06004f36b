"""Where a model is computed, and in what numbers."""

from __future__ import annotations

import torch

from symbiosis.errors import SymbiosisError


def resolve_device(device: str | torch.device) -> torch.device:
    """A device that is there. Raises `SymbiosisError`."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise SymbiosisError(f"device={device!r}: expected cpu, cuda or cuda:N") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        seen = f"torch sees {torch.cuda.device_count()} GPUs" if torch.version.cuda else "this torch was built without CUDA"
        raise SymbiosisError(f"device={str(place)!r}: there is no such GPU here ({seen})")
    return place


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None: as the model is stored. Raises `SymbiosisError`."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise SymbiosisError(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    return found
