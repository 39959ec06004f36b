"""Kernels that begin while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel launched `early` finds out what it has to do, and fetches what nobody
is writing, before `wait_for_last`; after that it may read what earlier kernels
wrote, and write itself. Every program of it waits, also one with nothing to do:
only so does its end say that everything before it has ended too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def early(device: torch.device, *, waits: bool = False) -> dict[str, Any]:
    """The settings of a launch there: `EARLY` for the kernel, and the driver's where it can.

    `waits`: of a kernel that begins when all before it has ended, as where streams part; the next may still be early. Where
    streams meet a kernel may be early: it waits for what came before it on both.
    """
    able = can_be_early(device)
    return {"EARLY": True, "launch_pdl": True} if able and not waits else {"EARLY": able}


def can_be_early(device: torch.device) -> bool:
    return device.type == "cuda" and _able(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _able(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_last(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the kernel before has ended and what it wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def let_next_begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel, if it is launched early, may begin once all programs of this one have said so or ended."""
    if EARLY:
        gdc_launch_dependents()
