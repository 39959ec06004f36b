"""Programmatic dependent launch (PDL, from Hopper on): a kernel begins while the previous one ends.

Before `wait_for_previous` a kernel finds out what it has to do and loads what no kernel is writing. After it, the kernel
may read what earlier kernels wrote, and write itself. Every program waits, also one with nothing to do: only then does
the end of the kernel imply the end of everything before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def pdl_options(device: torch.device, *, waits: bool = False) -> dict[str, Any]:
    """Launch options: `PDL` for the kernel, and the driver's option where the device supports it.

    `waits`: the kernel begins when all before it have ended, as where streams fork; the next one may still begin early.
    Where streams join, a kernel may begin early: it waits for both streams.
    """
    is_supported = supports_pdl(device)
    return {"PDL": True, "launch_pdl": True} if is_supported and not waits else {"PDL": is_supported}


def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and _is_hopper(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _is_hopper(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the previous kernel has ended and its results can be read."""
    if PDL:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def launch_dependents(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin, if it uses PDL, once all programs of this one have called this or ended."""
    if PDL:
        gdc_launch_dependents()
