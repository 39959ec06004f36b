"""Refusing what cannot fit before anything is loaded, with the figures."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from symbiosis.common.available_memory import available_memory
from symbiosis.errors import DoesNotFit
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.quantities import format_bytes

_BLOCK_TOKENS, _DEFAULT_BLOCKS = 16, 1024


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors can use on a device, what torch holds in reserve included."""
    if device.type == "cpu":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def check_fits(what: str, parts: Mapping[str, int], device: torch.device, hint: str, available: int | None = None) -> None:
    """Raise `DoesNotFit` if the parts are larger than what is available, by default the device's free memory."""
    needed = sum(parts.values())
    available = free_memory(device) if available is None else available
    if needed <= available:
        return
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    raise DoesNotFit(
        f"{what} does not fit on {device}: {format_bytes(needed)} needed ({listed}), {format_bytes(available)} available, "
        f"{format_bytes(needed - available)} missing: {hint}",
        needed=needed,
        available=available,
    )


def check_server(
    size: ModelSize,
    device: torch.device,
    *,
    hosting: bool,
    shards: int = 1,
    cache_bytes: int | None = None,
    adapter_bytes: int = 0,
    available: int | None = None,
) -> None:
    """Raise `DoesNotFit` if a server of this model cannot hold what it allocates at its start.

    Packed copies of a CPU engine are left out: they are made only where there is room. So is the adapter pool of a CPU, which
    grows with its adapters.
    """
    token = size.kv_cache_token()
    parts = {"base weights": size.weights // shards}
    hint = "use --dtype bfloat16, another --device, or --shards N" if size.dtype.itemsize > 2 else "use another --device"
    if hosting:
        parts["KV cache"] = _DEFAULT_BLOCKS * _BLOCK_TOKENS * token if cache_bytes is None else cache_bytes
        if device.type == "cpu":
            parts["fused copies"] = size.fused
        else:
            parts["adapter cache"] = adapter_bytes
            hint += ", or a smaller --cache-gb or --adapter-gb"
        hint += " or a smaller --cache-gb" if device.type == "cpu" else ""
    check_fits(size.name, parts, device, f"{hint}; `symbiosis plan` shows what fits", available)
